"""What each family is measured with, in words: the way out when a sample does not fit."""

from __future__ import annotations

from ..core.families import GPT2Spec, MLPSpec, ModelSpec, ResNetSpec


def expected_inputs(spec: ModelSpec) -> str:
    """The inputs that fit, e.g. ``mlp takes 'input' of shape (micro-batch, 64)``."""
    if isinstance(spec, MLPSpec):
        return f"mlp takes 'input' of shape (micro-batch, {spec.config.input_size})"
    if isinstance(spec, GPT2Spec):
        return (
            "gpt2 takes 'input_ids' of shape (micro-batch, length), "
            f"length at most {spec.config.n_positions}, {_indices(spec.config.vocab_size)}"
        )
    shape = f"(micro-batch, {spec.config.in_channels}, height, width)"
    if isinstance(spec, ResNetSpec):
        return f"resnet takes 'x' of shape {shape}"
    multiple = 2**spec.config.depth
    return f"unet takes 'x' of shape {shape}, height and width multiples of {multiple}"


def expected_target(spec: ModelSpec) -> str:
    """The target that fits, likewise."""
    if isinstance(spec, GPT2Spec):
        return f"gpt2 takes a target of the shape of input_ids, {_indices(spec.config.vocab_size)}"
    if isinstance(spec, MLPSpec):
        return f"mlp takes a target of shape (micro-batch), {_indices(spec.config.output_size)}"
    classes = _indices(spec.config.num_classes)
    if isinstance(spec, ResNetSpec):
        return f"resnet takes a target of shape (micro-batch), {classes}"
    return f"unet takes a target of shape (micro-batch, height, width), {classes}"


def _indices(count: int) -> str:
    return f"dtype int64, filled by randint from low 0 to high {count} at most"
