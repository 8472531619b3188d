"""A request's batch as pieces that the stages take, and their outputs as one again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...capture.captured import Captured
from ...core.errors import InvalidInput
from ...core.graph.tensors import TensorSpec
from ..engine.microbatch import join_outputs, split_batch
from .microbatch import Values


@dataclass(frozen=True)
class Split:
    """A batch in pieces.

    Attributes:
        pieces: The model's flat inputs, of each.
        sizes: Samples of each.
        padding: Samples at the end of the last that are not the caller's.
    """

    pieces: list[Values]
    sizes: list[int]
    padding: int = 0

    def join(self, outputs: list[Values]) -> Values:
        """The flat outputs of the whole batch.

        Raises:
            InvalidInput: An output's first dimension is not the batch, so that pieces cannot be
                put together, or padding not taken off.
        """
        if not self.padding:
            return outputs[0] if len(outputs) == 1 else join_outputs(outputs, self.sizes)
        for position, value in enumerate(outputs[0]):
            if isinstance(value, Tensor) and not value.dim():
                raise InvalidInput(
                    f"output {position} is one number for all samples, those of the padding "
                    "included; give batches of the captured size, or leave pad= out"
                )
        wanted = sum(self.sizes) - self.padding
        return tuple(
            value[:wanted] if isinstance(value, Tensor) else value
            for value in join_outputs(outputs, self.sizes)
        )


class Splitter:
    """Splits batches along their first dimension into pieces no larger than a micro-batch.

    Args:
        captured: The model. One captured by ``torch.export``, in training or for its evaluation,
            takes micro-batches of one shape alone.
        specs: Its inputs at the plan's micro-batch size; empty if the plan records none.
        pad: Whether a batch that does not fill such a micro-batch is filled up.
    """

    def __init__(self, captured: Captured, specs: Sequence[TensorSpec], *, pad: bool) -> None:
        both = [captured, *([captured.evaluation] if captured.evaluation is not None else [])]
        self._one_shape = any(each.program.mode == "export" for each in both)
        self._names, self._specs, self._pad = captured.structure.names, specs, pad
        self._size = next((spec.shape[0] for spec in specs if spec.shape), None)

    def split(self, flat: Sequence[Tensor]) -> Split:
        """A batch in pieces.

        Raises:
            InvalidInput: Inputs differ in their first dimension, or are not of the shape that the
                model was captured at.
        """
        length = next((len(tensor) for tensor in flat if tensor.dim()), 0)
        padding = 0
        if self._one_shape and self._size is not None:
            self._check_shapes(flat, length)
            padding = -length % self._size
            flat = [_padded(tensor, padding) for tensor in flat] if padding else flat
            length += padding
        if self._size is None or length <= self._size:
            return Split([tuple(flat)], [length], padding)
        size = self._size if self._one_shape else None
        pieces = split_batch(flat, -(-length // self._size), size, self._names)
        return Split(pieces, [len(piece[0]) for piece in pieces], padding)

    def _check_shapes(self, flat: Sequence[Tensor], length: int) -> None:
        for tensor, spec in zip(flat, self._specs, strict=True):
            size = spec.shape[0]
            fits = tensor.dim() == len(spec.shape) and tuple(tensor.shape[1:]) == spec.shape[1:]
            fills = self._pad or not length % size
            if fits and length and len(tensor) == length and fills:
                continue
            rest = "".join(f", {extent}" for extent in spec.shape[1:])
            raise InvalidInput(
                f"input {spec.name!r} has shape {tuple(tensor.shape)}, and this model could only "
                f"be captured at one shape: give {spec.shape} or a multiple, (k x {size}{rest}). "
                "pad=True fills smaller batches up, if the model's samples do not depend on each "
                "other; or profile and plan at the size you serve"
            )


def _padded(tensor: Tensor, padding: int) -> Tensor:
    """With its last sample repeated: values that the model can take."""
    return torch.cat([tensor, tensor[-1:].expand(padding, *tensor.shape[1:])])


def call_of(batch: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """A batch of a stream as the arguments of a call: a tensor, a tuple or a dict of keywords."""
    if isinstance(batch, Mapping):
        return (), batch
    return (tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {}
