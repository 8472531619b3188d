"""Comparison of the batches that ranks are given for one step.

Every rank has a data loader of its own. Where their orders differ, the first stage computes outputs
of other samples than the last stage has targets for, and the loss never falls.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...capture.observation.nested_values import list_tensors
from ...core.errors import InvalidInput
from ..ranks.consistency import split_by_agreement
from ..ranks.failure_detection import FailureDetector

MAX_SAMPLED_ELEMENTS = 65_536
"""Most elements of a tensor that its checksum reads; spread evenly, over every sample."""


class BatchComparison:
    """Comparison of the checksums of the inputs and targets that ranks were given.

    Every rank publishes its own when a step begins, and waits for no other. The first rank of the
    last stage, ``reader``, reads them when its step ends: the ranks that it had values from have
    published.
    """

    def __init__(self, detector: FailureDetector, reader: int) -> None:
        self._detector = detector
        self._is_needed = detector.num_ranks > 1
        self._compares = detector.rank == reader
        self._step = 0

    def publish(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], target: Any) -> None:
        """Show the others what this rank was given for the next step."""
        self._step += 1
        if self._is_needed:
            inputs = [*args, *(kwargs[name] for name in sorted(kwargs))]
            sums = [compute_checksum(inputs), compute_checksum(target)]
            # The first stage may be a step ahead of the last one, but never two.
            self._detector.publish(f"batch {self._step % 2}", json.dumps([self._step, *sums]))

    def compare(self, step: int) -> None:
        """Check that all ranks that were given inputs, or targets, were given equal ones.

        ``step`` is the number for messages.

        Raises:
            InvalidInput: They were not; the message names the ranks.
        """
        if not (self._is_needed and self._compares):
            return
        found = self._detector.read_all(f"batch {self._step % 2}")
        published = [json.loads(each or "[0, null, null]") for each in found]
        for position, what in ((1, "inputs"), (2, "targets")):
            given = {
                rank: each[position]
                for rank, each in enumerate(published)
                if each[0] == self._step and each[position] is not None
            }
            if len(set(given.values())) > 1:
                usual, unusual = split_by_agreement(given)
                raise InvalidInput(
                    f"the ranks were given different {what} for step {step}: those of "
                    f"{unusual} are not those of {usual}. Seed all ranks' data loaders alike, or "
                    "use stagewright.data.PipelineLoader; only the first stage needs inputs, and "
                    "only the last one targets"
                )


def compute_checksum(values: Any) -> int | None:
    """Return a checksum of a nest's tensors; `None` if it holds none."""
    tensors = list_tensors(values)
    return zlib.crc32(b"".join(_sample_bytes(tensors))) if tensors else None


def _sample_bytes(tensors: Iterable[Tensor]) -> Iterable[bytes]:
    for tensor in tensors:
        yield str(tuple(tensor.shape)).encode()
        if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
            continue
        rows = tensor.detach().reshape(len(tensor) if tensor.dim() else 1, -1)
        every = -(-tensor.numel() // MAX_SAMPLED_ELEMENTS)
        # Ranks may be given the same values as integers of other widths, in float32 and float64,
        # or on other devices. Rounded to half precision they are other values.
        wide = torch.float64 if tensor.is_floating_point() else torch.int64
        chosen = rows if tensor.is_complex() else rows[:, ::every].to("cpu", wide)
        yield chosen.cpu().contiguous().view(torch.uint8).numpy().tobytes()
