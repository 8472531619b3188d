"""Telling that memory ran out from other errors; torch is looked up, not imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

CPU_ALLOCATOR = "DefaultCPUAllocator"
"""Opens the message of torch's CPU allocator, whose error has no class of its own."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error or its cause says that host or device memory ran out."""
    return any(map(_says_so, _causes(error)))


def device_bytes(error: BaseException) -> int | None:
    """Return the total memory of the GPU that ran out; `None` if it was the host."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    if not any(isinstance(cause, torch.OutOfMemoryError) for cause in _causes(error)):
        return None
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def _says_so(error: BaseException) -> bool:
    torch: Any = sys.modules.get("torch")
    if isinstance(error, RuntimeError) and CPU_ALLOCATOR in str(error):
        return True
    return isinstance(error, MemoryError) or (
        torch is not None and isinstance(error, torch.OutOfMemoryError)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


BLOCK_BYTES = 512
"""Every request is rounded up to a multiple of this."""


def block_bytes(size_bytes: int) -> int:
    """Return what a tensor of this size adds to ``torch.cuda.memory_allocated``."""
    if size_bytes <= 0:
        return 0
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def allocated_bytes(size_bytes: int, device: Any) -> int:
    """Return the bytes a tensor takes on a device: whole blocks on CUDA, its size elsewhere."""
    return block_bytes(size_bytes) if device.type == "cuda" else size_bytes
