"""Measure allocations while something runs: by events on the CPU, by counts on CUDA.

Nothing here knows of autograd: it is what predictions of memory are held against.
"""

from __future__ import annotations

import gc
from types import TracebackType
from typing import Self

import torch


class Allocations:
    """Bytes a device's allocator gave and took back inside a ``with`` block.

    On the CPU every call of torch's allocator is recorded by the profiler, scratch memory inside
    kernels included; memory that libraries map for themselves is not. On CUDA the counts are
    those of the caching allocator, in blocks of 512 bytes.

    Attributes:
        kept_bytes: Given inside and still held at the end, less what was held before and freed.
        peak_bytes: The most above the beginning at any moment.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self.kept_bytes = 0
        self.peak_bytes = 0

    def __enter__(self) -> Self:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()  # a block left over is handed out whole for less
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        else:
            self._profiler = torch.autograd.profiler.profile(
                use_cpu=True, profile_memory=True, acc_events=False
            )
            self._profiler.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self.kept_bytes = torch.cuda.memory_allocated(self._device) - self._before
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device) - self._before
            return
        self._profiler.__exit__(kind, error, trace)
        results = self._profiler.kineto_results
        assert results is not None
        changes = [
            (event.start_ns(), event.nbytes())
            for event in results.events()
            if event.name() == "[memory]"
        ]
        for _, change in sorted(changes, key=lambda entry: entry[0]):
            self.kept_bytes += change
            self.peak_bytes = max(self.peak_bytes, self.kept_bytes)
