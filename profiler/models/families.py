"""Builds the models that `core.families` describes, their losses and their samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...core.graph.tensors import Sample, SampleTensor, TensorSpec
from ...core.models.families import (
    BertSpec,
    CausalLMSpec,
    GPT2Spec,
    LlamaSpec,
    MixtralSpec,
    MLPConfig,
    MLPSpec,
    ModelSpec,
    Qwen2Spec,
    ResNetSpec,
    T5Spec,
    UNetSpec,
    ViTSpec,
)
from ...core.requests.default_samples import default_sample, get_max_sequence_length
from .resnet import ResNet
from .transformer import build_transformer
from .unet import UNet

LossFunction = Callable[[Any, Tensor], Tensor]

NumberSpec = MLPSpec | ResNetSpec | UNetSpec | ViTSpec
"""Families whose inputs are floating-point numbers, not tokens."""


def build_model(spec: ModelSpec) -> nn.Module:
    """Build a model with random weights, in training mode."""
    if isinstance(spec, MLPSpec):
        return _mlp(spec.config)
    if isinstance(spec, ResNetSpec):
        return ResNet(spec.config)
    if isinstance(spec, UNetSpec):
        return UNet(spec.config)
    return build_transformer(spec)


def build_loss(spec: ModelSpec) -> LossFunction:
    """Return a family's usual training loss, the mean over the micro-batch."""
    if isinstance(spec, GPT2Spec | LlamaSpec | Qwen2Spec | MixtralSpec | CausalLMSpec):
        return next_token_loss
    if isinstance(spec, BertSpec | T5Spec):
        return token_loss
    return image_loss if isinstance(spec, ViTSpec) else class_loss


def class_loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of ``(batch, classes, ...)`` scores against class indices."""
    return functional.cross_entropy(output, target)


def next_token_loss(output: Any, target: Tensor) -> Tensor:
    """Cross-entropy of each position's logits against the next token of ``target``."""
    logits = output.logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())


def token_loss(output: Any, target: Tensor) -> Tensor:
    """Cross-entropy of each position's logits against the token of ``target`` there."""
    return functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def image_loss(output: Any, target: Tensor) -> Tensor:
    """Cross-entropy of an image's logits against its class."""
    return functional.cross_entropy(output.logits, target)


def make_sample(
    sample: Sample, device: torch.device | str = "cpu"
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Make the tensors a `Sample` describes: inputs by name, and the target if any."""
    generator = torch.Generator().manual_seed(sample.seed)
    inputs = {name: make_tensor(spec, generator).to(device) for name, spec in sample.inputs.items()}
    target = make_tensor(sample.target, generator).to(device) if sample.target else None
    return inputs, target


def make_tensor(spec: SampleTensor, generator: torch.Generator) -> Tensor:
    """Make one tensor, filled as described."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if spec.fill == "randn":
        return torch.randn(spec.shape, generator=generator).to(dtype)
    if spec.fill == "randint":
        return torch.randint(spec.low, spec.high, spec.shape, generator=generator).to(dtype)
    return torch.zeros(spec.shape, dtype=dtype)


def training_batch(
    spec: ModelSpec, inputs: Sequence[TensorSpec], num_microbatches: int, *, seed: int
) -> tuple[dict[str, Tensor], Tensor]:
    """Make a synthetic batch of the given micro-batch shapes and a fitting target."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {entry.name: (entry.shape[0] * num_microbatches, *entry.shape[1:]) for entry in inputs}
    classes = _count_classes(spec)
    if not isinstance(spec, NumberSpec):
        batch = {
            name: torch.randint(0, classes, shape, generator=generator)
            for name, shape in shapes.items()
        }
        return batch, next(reversed(batch.values()))
    batch = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    first = next(iter(shapes.values()))
    if isinstance(spec, MLPSpec):
        shape = first[:-1]
    else:
        shape = (first[0], *first[2:]) if isinstance(spec, UNetSpec) else first[:1]
    return batch, torch.randint(0, classes, shape, generator=generator)


def _mlp(config: MLPConfig) -> nn.Sequential:
    layers: list[nn.Module] = []
    width = config.input_size
    for _ in range(config.num_layers - 1):
        layers += [nn.Linear(width, config.hidden_size), nn.ReLU()]
        if config.dropout:
            layers.append(nn.Dropout(config.dropout))
        width = config.hidden_size
    return nn.Sequential(*layers, nn.Linear(width, config.output_size))


def expected_inputs(spec: ModelSpec) -> str:
    """Describe the inputs that fit, e.g. ``mlp takes 'input' of shape (micro-batch, 64)``."""
    if isinstance(spec, MLPSpec):
        return f"mlp takes 'input' of shape (micro-batch, {spec.config.input_size})"
    if isinstance(spec, ViTSpec):
        config = spec.config
        shape = f"(micro-batch, {config.num_channels}, {config.image_size}, {config.image_size})"
        return f"vit takes 'pixel_values' of shape {shape}"
    if not isinstance(spec, ResNetSpec | UNetSpec):
        names = "'input_ids'"
        if isinstance(spec, T5Spec):
            names += " and 'decoder_input_ids', each"
        limit = get_max_sequence_length(spec)
        return (
            f"{spec.family} takes {names} of shape (micro-batch, length), "
            + (f"length at most {limit}, " if limit else "")
            + _indices(spec.config.vocab_size)
        )
    shape = f"(micro-batch, {spec.config.in_channels}, height, width)"
    if isinstance(spec, ResNetSpec):
        return f"resnet takes 'x' of shape {shape}"
    multiple = 2**spec.config.depth
    return f"unet takes 'x' of shape {shape}, height and width multiples of {multiple}"


def expected_target(spec: ModelSpec) -> str:
    """Describe the target that fits the family's loss."""
    classes = _indices(_count_classes(spec))
    if not isinstance(spec, NumberSpec):
        like = "decoder_input_ids" if isinstance(spec, T5Spec) else "input_ids"
        return f"{spec.family} takes a target of the shape of {like}, {classes}"
    pixels = ", height, width" if isinstance(spec, UNetSpec) else ""
    return f"{spec.family} takes a target of shape (micro-batch{pixels}), {classes}"


def _count_classes(spec: ModelSpec) -> int:
    """Return how many classes, or tokens, a family's model tells apart."""
    target = default_sample(spec).target
    assert target is not None, "every family has a loss"
    return target.high


def _indices(count: int) -> str:
    return f"dtype int64, filled by randint from low 0 to high {count} at most"
