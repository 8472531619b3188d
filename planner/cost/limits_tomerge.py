"""How much of a device a plan may use, and which numbers can still be added up."""

from __future__ import annotations

import math

from ...core.plan.plan import PlanOptions

LARGEST_TOTAL_BYTES = 2**60
"""Above this (1 EiB) products of bytes and micro-batches could overflow 64 bits."""

LARGEST_TOTAL_S = 1e12
"""Above this (30,000 years) a time is a mistake, and sums could become infinite."""


def usable_bytes(memory_bytes: int | None, options: PlanOptions) -> int | None:
    """The share of a device's memory that a plan may use, rounded down."""
    return None if memory_bytes is None else math.floor(memory_bytes * options.memory_fraction)
