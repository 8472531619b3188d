"""Rehearse on the CPU, taken for a card, what a stage would ask of torch.cuda."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.profiler.cuda_stub import CudaStub

CARD = 1
"""Not the current one, or calls that name no device would pass unseen."""


@contextmanager
def rehearsed_on_card() -> Iterator[CudaStub]:
    """Take CPU tensors for a card's, record the calls of torch.cuda, and judge them at the end.

    Times are the stub's, and say nothing.

    Raises:
        RuntimeError: Something was asked of another card, a peak was read that did not begin with
            an empty cache, or nothing was asked at all.
    """
    with CudaStub().takes_cpu(CARD) as stub:
        yield stub
    fault = stub.fault() if stub.calls else "nothing was asked of torch.cuda"
    if fault is not None:
        raise RuntimeError(f"on a card: {fault}")
