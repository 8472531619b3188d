"""Default samples of the model families: one micro-batch each, as data."""

from __future__ import annotations

from ..errors import InvalidInput
from ..graph.tensors import Sample, SampleTensor
from ..models.families import (
    BertSpec,
    CausalLMSpec,
    GPT2Spec,
    LlamaSpec,
    MixtralSpec,
    MLPSpec,
    ModelSpec,
    Qwen2Spec,
    ResNetSpec,
    T5Spec,
    UNetSpec,
    ViTSpec,
)

IMAGE_SIDE = 224
"""Side of an ImageNet crop in pixels (He et al. 2016)."""

DEFAULT_LENGTH = 512
"""Tokens per sample if neither a preset nor the caller gives a length."""


def default_sample(
    spec: ModelSpec, microbatch: int = 1, sequence_length: int | None = None
) -> Sample:
    """Return inputs and target of one micro-batch of a family.

    Without ``sequence_length`` a sample has 512 tokens, or the model's maximum if smaller.

    Raises:
        InvalidInput: The family has no sequence length, or the length exceeds its maximum.
    """
    if isinstance(spec, MLPSpec | ResNetSpec | UNetSpec | ViTSpec):
        if sequence_length is not None:
            raise InvalidInput(
                f"the family {spec.family!r} has no sequence length", field="/sequence"
            )
        return _of_numbers(spec, microbatch)
    shape = (microbatch, _length(spec, sequence_length))
    tokens = SampleTensor(
        shape=shape, dtype="int64", fill="randint", low=0, high=spec.config.vocab_size
    )
    inputs = {"input_ids": tokens}
    if isinstance(spec, T5Spec):
        # The decoder reads a sequence of its own, here of equal length.
        inputs["decoder_input_ids"] = tokens
    # Language models predict a token at every position.
    return Sample(inputs=inputs, target=tokens)


def get_max_sequence_length(spec: ModelSpec) -> int | None:
    """Return the most tokens that a sample may have; `None` if unlimited."""
    if isinstance(spec, GPT2Spec):
        return spec.config.n_positions
    if isinstance(spec, LlamaSpec | Qwen2Spec | MixtralSpec | CausalLMSpec | BertSpec):
        return spec.config.max_position_embeddings
    return None


def _length(spec: ModelSpec, wanted: int | None) -> int:
    limit = get_max_sequence_length(spec)
    if wanted is None:
        return min(DEFAULT_LENGTH, limit or DEFAULT_LENGTH)
    if limit is not None and wanted > limit:
        raise InvalidInput(
            f"{wanted} tokens exceed this {spec.family}'s maximum sequence length of {limit}",
            field="/sequence",
        )
    return wanted


def _of_numbers(spec: MLPSpec | ResNetSpec | UNetSpec | ViTSpec, microbatch: int) -> Sample:
    shape: tuple[int, ...]
    if isinstance(spec, MLPSpec):
        name, shape = "input", (microbatch, spec.config.input_size)
        classes = spec.config.output_size
    elif isinstance(spec, ViTSpec):
        side = spec.config.image_size
        name, shape = "pixel_values", (microbatch, spec.config.num_channels, side, side)
        classes = spec.config.num_labels
    else:
        name = "x"
        shape = (microbatch, spec.config.in_channels, IMAGE_SIDE, IMAGE_SIDE)
        classes = spec.config.num_classes
    # A U-Net labels every pixel; the others label the whole sample.
    labels = (microbatch, *shape[2:]) if isinstance(spec, UNetSpec) else (microbatch,)
    return Sample(
        inputs={name: SampleTensor(shape=shape)},
        target=SampleTensor(
            shape=labels, dtype="int64", fill="randint", low=0, high=max(classes, 1)
        ),
    )
