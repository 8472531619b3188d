"""Memory of this machine: how much, how it is allocated, and that it ran out; imports no torch."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def host_memory_bytes() -> int:
    """Physical memory, or the container's limit where that is lower."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = CONTAINER_LIMIT.read_text().strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical


def free_memory_bytes() -> int | None:
    """Memory that new work may take without others losing theirs; `None` if not known."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return min(int(line.split()[1]) * 1024, host_memory_bytes())
    return None


_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_MAX = -4


def keep_freed_memory() -> bool:
    """Stop glibc from handing freed tensors back to the system; return False without glibc.

    By default each allocation of more than a few megabytes is mapped afresh and its pages are
    zeroed by the kernel at first touch, in every step. For the rest of this process, memory once
    taken is used again. Meant for programs that own their process, such as training workers.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 2**26))
    return all(mallopt(name, value) for name, value in settings)


NO_CLASS = r"DefaultCPUAllocator|CUDA error: out of memory|'out of memory'|_ALLOC(ATION)?_FAILED"
"""In messages for lack of memory that have no class of their own: torch, NCCL, cuBLAS, cuDNN."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error or its cause says that host or device memory ran out."""
    torch: Any = sys.modules.get("torch")
    kinds = (MemoryError,) if torch is None else (MemoryError, torch.OutOfMemoryError)
    return any(
        isinstance(cause, kinds)
        or (isinstance(cause, RuntimeError) and re.search(NO_CLASS, str(cause)) is not None)
        for cause in causes(error)
    )


def device_bytes(error: BaseException) -> int | None:
    """Return the total memory of the GPU that ran out; `None` if it was the host."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    for cause in causes(error):
        if isinstance(cause, torch.OutOfMemoryError):
            # The message names the device, which need not be the current one.
            named = re.search(r"GPU (\d+)", str(cause))
            device = int(named[1]) if named else torch.cuda.current_device()
            return int(torch.cuda.get_device_properties(device).total_memory)
    return None


def free_after(error: BaseException) -> None:
    """Free the tensors of failed calls, whose frames the traceback keeps, and CUDA's cache."""
    for cause in causes(error):
        traceback.clear_frames(cause.__traceback__)
    gc.collect()
    sys.modules["torch"].cuda.empty_cache()


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes, the last raised first."""
    while error is not None:
        yield error
        error = error.__cause__


ON_CUDA = {"cuda"}
"""Types of device that are measured through torch.cuda; tests add the CPU's."""


BLOCK_BYTES = 512
"""torch's CUDA allocator rounds every request up to a multiple of this."""


def allocated_bytes(size_bytes: int, device: Any) -> int:
    """Return the bytes a tensor takes on a device: whole blocks on CUDA, its size elsewhere."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES if device.type in ON_CUDA else size_bytes
