"""How CUDA's caching allocator rounds: what a tensor takes of a device's memory.

The size is that of PyTorch's ``c10/cuda/CUDACachingAllocator.cpp`` (``kMinBlockSize``) under the
default settings of ``PYTORCH_CUDA_ALLOC_CONF``. The segments that blocks are cut from are reserved,
not allocated, and no part of a peak.
"""

from __future__ import annotations

from typing import Any

BLOCK_BYTES = 512
"""Every request is rounded up to a multiple of this."""


def block_bytes(size_bytes: int) -> int:
    """What a tensor of this size adds to ``torch.cuda.memory_allocated``; nothing takes nothing."""
    if size_bytes <= 0:
        return 0
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def allocated_bytes(size_bytes: int, device: Any) -> int:
    """What a tensor takes on this device: blocks on CUDA, its own bytes elsewhere."""
    return block_bytes(size_bytes) if device.type == "cuda" else size_bytes
