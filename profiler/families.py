"""Builds the models that `core.families` describes, their losses and their samples."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.errors import MeasurementError
from ..core.families import GPT2Config, GPT2Spec, MLPConfig, MLPSpec, ModelSpec, ResNetSpec
from ..core.sample import Sample, SampleTensor
from ..core.tensors import TensorSpec
from .resnet import ResNet
from .unet import UNet

LossFunction = Callable[[Any, Tensor], Tensor]


def build_model(spec: ModelSpec) -> nn.Module:
    """A model with random weights, in training mode.

    Raises:
        MeasurementError: The family needs a package that is not installed.
    """
    if isinstance(spec, MLPSpec):
        return _mlp(spec.config)
    if isinstance(spec, ResNetSpec):
        return ResNet(spec.config)
    if isinstance(spec, GPT2Spec):
        return _gpt2(spec.config)
    return UNet(spec.config)


def build_loss(spec: ModelSpec) -> LossFunction:
    """The usual training loss of a family: mean over the micro-batch."""
    return next_token_loss if isinstance(spec, GPT2Spec) else class_loss


def class_loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of ``(batch, classes, ...)`` scores against class indices."""
    return functional.cross_entropy(output, target)


def next_token_loss(output: Any, target: Tensor) -> Tensor:
    """Cross-entropy of each position's logits against the next token of ``target``."""
    logits = output.logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())


def make_sample(
    sample: Sample, device: torch.device | str = "cpu"
) -> tuple[dict[str, Tensor], Tensor | None]:
    """The tensors a `Sample` describes: inputs by name, and the target if it has one."""
    generator = torch.Generator().manual_seed(sample.seed)
    inputs = {name: make_tensor(spec, generator).to(device) for name, spec in sample.inputs.items()}
    target = make_tensor(sample.target, generator).to(device) if sample.target else None
    return inputs, target


def make_tensor(spec: SampleTensor, generator: torch.Generator) -> Tensor:
    """One tensor, filled as described."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if spec.fill == "randn":
        return torch.randn(spec.shape, generator=generator).to(dtype)
    if spec.fill == "randint":
        return torch.randint(spec.low, spec.high, spec.shape, generator=generator).to(dtype)
    return torch.zeros(spec.shape, dtype=dtype)


def training_batch(
    spec: ModelSpec, inputs: Sequence[TensorSpec], num_microbatches: int, *, seed: int
) -> tuple[dict[str, Tensor], Tensor]:
    """A made-up batch of the given micro-batch shapes, and a target that fits the family's loss."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {entry.name: (entry.shape[0] * num_microbatches, *entry.shape[1:]) for entry in inputs}
    if isinstance(spec, GPT2Spec):
        batch = {
            name: torch.randint(0, spec.config.vocab_size, shape, generator=generator)
            for name, shape in shapes.items()
        }
        return batch, next(iter(batch.values()))
    batch = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    first = next(iter(shapes.values()))
    if isinstance(spec, MLPSpec):
        classes, shape = spec.config.output_size, first[:-1]
    elif isinstance(spec, ResNetSpec):
        classes, shape = spec.config.num_classes, first[:1]
    else:
        classes, shape = spec.config.num_classes, (first[0], *first[2:])
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


def _gpt2(config: GPT2Config) -> nn.Module:
    try:
        import transformers
    except ImportError as error:
        raise MeasurementError(
            "the family 'gpt2' needs transformers; pip install 'stagewright[hf]'"
        ) from error
    logging.getLogger("transformers").setLevel(logging.ERROR)
    end = config.vocab_size - 1
    model: nn.Module = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.n_positions,
            n_embd=config.n_embd,
            n_layer=config.n_layer,
            n_head=config.n_head,
            resid_pdrop=config.dropout,
            embd_pdrop=config.dropout,
            attn_pdrop=config.dropout,
            bos_token_id=end,
            eos_token_id=end,
            use_cache=False,
        )
    )
    return model.train()
