"""Partition of a sequence into consecutive blocks with the smallest largest sum."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.errors import InvalidInput
from ...planner.heuristics.chain_partition import balance

__all__ = ["solve"]


def solve(sequence: Sequence[float], partitions: int = 1) -> list[list[float]]:
    """Split a sequence into consecutive blocks, none empty.

    Args:
        sequence: Costs, finite and not negative.
        partitions: Number of blocks.

    Returns:
        The blocks. They minimize the largest sum and, among those, the sum of squares;
        torchgpipe's heuristic may return a larger sum.

    Raises:
        ValueError: The number of blocks is not positive, or exceeds the number of costs.
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
