"""Splitting of a request's batch into micro-batches, and joining of their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ...capture.captured import Captured
from ...core.errors import InvalidInput
from ...core.graph.tensors import TensorSpec
from ..engine.microbatch import check_inputs, join_outputs, split_batch
from ..engine.padding import pad_samples
from .microbatch import Values


@dataclass(frozen=True)
class BatchSplit:
    """Batch split into micro-batches.

    Attributes:
        microbatches: The model's flat inputs, by micro-batch.
        sizes: Samples in each micro-batch.
        padding: Samples appended to the last micro-batch.
    """

    microbatches: list[Values]
    sizes: list[int]
    padding: int = 0

    def join(self, outputs: list[Values]) -> Values:
        """Join the flat outputs of the micro-batches, without the padding."""
        if not self.padding:
            return outputs[0] if len(outputs) == 1 else join_outputs(outputs, self.sizes)
        for position, value in enumerate(outputs[0]):
            if isinstance(value, Tensor) and not value.dim():
                raise InvalidInput(
                    f"output {position} is a single number over all samples, padding included; "
                    "use batches of the captured size, without pad="
                )
        length = sum(self.sizes) - self.padding
        return tuple(
            value[:length] if isinstance(value, Tensor) else value
            for value in join_outputs(outputs, self.sizes)
        )


class BatchSplitter:
    """Splitter of batches by first dimension into micro-batches of at most the planned size.

    A model captured by ``torch.export``, for training or for evaluation, accepts micro-batches of a
    single shape only; ``pad`` fills them up. ``specs`` are its inputs at the plan's micro-batch
    size, empty if the plan does not record them.
    """

    def __init__(self, captured: Captured, specs: Sequence[TensorSpec], *, pad: bool) -> None:
        self._fixed, self._names, self._pad = captured.fixed_inputs, captured.structure.names, pad
        self._size = next((spec.shape[0] for spec in specs if spec.shape), None)

    def split(self, flat: Sequence[Tensor]) -> BatchSplit:
        """Split a batch into micro-batches."""
        length = next((len(tensor) for tensor in flat if tensor.dim()), 0)
        padding = 0
        if self._fixed is not None and self._size is not None:
            self._check_samples(flat, length, self._size)
            padding = -length % self._size  # samples up to the next multiple of the size
            length += padding
            flat = pad_samples(list(flat), length) if padding else flat
        if self._size is None or length <= self._size:
            return BatchSplit([tuple(flat)], [length], padding)
        microbatches = split_batch(flat, -(-length // self._size), self._fixed, self._names)
        return BatchSplit(
            microbatches, [len(microbatch[0]) for microbatch in microbatches], padding
        )

    def _check_samples(self, flat: Sequence[Tensor], length: int, size: int) -> None:
        assert self._fixed is not None
        check_inputs(flat, self._fixed)
        fills = length and (self._pad or not length % size)
        for tensor, spec in zip(flat, self._fixed, strict=True):
            if fills and len(tensor) == length:
                continue
            rest = "".join(f", {extent}" for extent in spec.shape[1:])
            raise InvalidInput(
                f"input {spec.name!r} has shape {tuple(tensor.shape)}, but this model could only "
                f"be captured at one shape: use {spec.shape} or a multiple, (k x {size}{rest}). "
                "If the model's samples are independent, pad=True pads smaller batches; otherwise "
                "profile and plan at the size you serve"
            )
