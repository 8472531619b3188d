"""How CUDA's caching allocator rounds: what a tensor takes of a device's memory.

The sizes are those of PyTorch's ``c10/cuda/CUDACachingAllocator.cpp`` (``kMinBlockSize``,
``kSmallSize``, ``kSmallBuffer``, ``kLargeBuffer``, ``kMinLargeAlloc``, ``kRoundLarge``) under the
default settings of ``PYTORCH_CUDA_ALLOC_CONF``.
"""

from __future__ import annotations

from typing import Any

KIB, MIB = 1024, 1024 * 1024

BLOCK_BYTES = 512
"""Every request is rounded up to a multiple of this."""

LARGEST_SMALL_BYTES = MIB
SMALL_SEGMENT_BYTES = 2 * MIB
"""Blocks of up to 1 MiB are cut from segments of this size."""

LARGE_SEGMENT_BYTES = 20 * MIB
LEAST_OWN_SEGMENT_BYTES = 10 * MIB
"""Blocks of up to 10 MiB, not included, are cut from segments of 20 MiB."""

SEGMENT_STEP_BYTES = 2 * MIB
"""A larger block has a segment of its own, rounded up to a multiple of this."""


def block_bytes(size_bytes: int) -> int:
    """What a tensor of this size adds to ``torch.cuda.memory_allocated``; nothing takes nothing."""
    if size_bytes <= 0:
        return 0
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def segment_bytes(size_bytes: int) -> int:
    """What it adds to ``torch.cuda.memory_reserved`` if no segment has room for it."""
    block = block_bytes(size_bytes)
    if block == 0:
        return 0
    if block <= LARGEST_SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if block < LEAST_OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-block // SEGMENT_STEP_BYTES) * SEGMENT_STEP_BYTES


def allocated_bytes(size_bytes: int, device: Any) -> int:
    """What a tensor takes on this device: blocks on CUDA, its own bytes elsewhere."""
    return block_bytes(size_bytes) if device.type == "cuda" else size_bytes
