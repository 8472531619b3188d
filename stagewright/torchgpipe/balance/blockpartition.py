"""Blocks of a sequence, the largest as small as possible."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.errors import InvalidInput
from ...planner.heuristics.chain_partition import balance

__all__ = ["solve"]


def solve(sequence: Sequence[float], partitions: int = 1) -> list[list[float]]:
    """Split a sequence into consecutive blocks, none empty.

    Args:
        sequence: Costs, finite and not negative.
        partitions: How many blocks.

    Returns:
        The blocks: the largest sum is the smallest possible, and among those the sum of squares
        is; torchgpipe's answer may be larger. See `planner.balance`.

    Raises:
        ValueError: There are fewer costs than blocks asked for, or no block is asked for.
    """
    if partitions < 1:
        raise InvalidInput(f"partitions must be a positive integer ({partitions} < 1)")
    if len(sequence) < partitions:
        raise InvalidInput(
            f"sequence is shorter than intended partitions ({len(sequence)} < {partitions})"
        )
    blocks, rest = [], list(sequence)
    for count in balance(sequence, partitions):
        blocks.append(rest[:count])
        rest = rest[count:]
    return blocks
