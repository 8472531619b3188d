"""What each family is measured with, in words: the way out when a sample does not fit."""

from __future__ import annotations

from ...core.models.families import MLPSpec, ModelSpec, ResNetSpec, UNetSpec
from ...core.models.transformer_families import T5Spec, ViTSpec
from ...core.requests.default_samples import longest


def expected_inputs(spec: ModelSpec) -> str:
    """The inputs that fit, e.g. ``mlp takes 'input' of shape (micro-batch, 64)``."""
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
        limit = longest(spec)
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
    """The target that fits, likewise."""
    if isinstance(spec, ViTSpec):
        return f"vit takes a target of shape (micro-batch), {_indices(spec.config.num_labels)}"
    if not isinstance(spec, MLPSpec | ResNetSpec | UNetSpec):
        like = "decoder_input_ids" if isinstance(spec, T5Spec) else "input_ids"
        return (
            f"{spec.family} takes a target of the shape of {like}, "
            f"{_indices(spec.config.vocab_size)}"
        )
    if isinstance(spec, MLPSpec):
        return f"mlp takes a target of shape (micro-batch), {_indices(spec.config.output_size)}"
    classes = _indices(spec.config.num_classes)
    if isinstance(spec, ResNetSpec):
        return f"resnet takes a target of shape (micro-batch), {classes}"
    return f"unet takes a target of shape (micro-batch, height, width), {classes}"


def _indices(count: int) -> str:
    return f"dtype int64, filled by randint from low 0 to high {count} at most"
