"""Exact chain partitioning: consecutive parts whose largest cost is least."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

from ...core.errors import InvalidInput


def balance(costs: Sequence[float], num_parts: int) -> list[int]:
    """Return the number of consecutive items in each part so that the largest part costs least.

    Among such partitions, the one with the least sum of squared part costs is returned, and ties
    are broken deterministically. Sums are integers, so rounding never decides. O(K log L) per probe
    and about ten probes for the largest part; at most O(K L log L) for the tie-break. K parts, none
    of them empty, of L items in order.
    """
    _check(costs, num_parts)
    prefix = [0, *accumulate(_as_integers(costs))]
    largest = _smallest_largest_part(prefix, num_parts)
    cuts = _least_squares_cuts(prefix, num_parts, largest)
    return [last - first for first, last in pairwise(cuts)]


def _check(costs: Sequence[float], num_parts: int) -> None:
    for position, cost in enumerate(costs):
        if not math.isfinite(cost) or cost < 0:
            raise InvalidInput(
                f"costs[{position}] is {cost}; a cost is finite and not negative",
                field=f"/costs/{position}",
            )
    if not 1 <= num_parts <= len(costs):
        raise InvalidInput(
            f"cannot cut {len(costs)} layers into {num_parts} parts of at least one layer; "
            f"ask for 1 to {len(costs)} parts"
            if len(costs)
            else "there are no layers to balance",
            field="/num_parts",
        )


def _as_integers(costs: Sequence[float]) -> list[int]:
    # Floats are dyadic rationals, so the largest denominator turns all of them into integers.
    ratios = [cost.as_integer_ratio() for cost in costs]
    factor = max(below for _, below in ratios)
    return [above * (factor // below) for above, below in ratios]


def _smallest_largest_part(prefix: list[int], num_parts: int) -> int:
    """Return the least cost of the largest part, by exact bisection.

    Pinar and Aykanat, "Fast optimal load balancing algorithms for 1D partitioning", JPDC 2004.

    Every probe moves a bound to the cost of some part: after a success the upper bound is the
    largest part of the greedy partition, after a failure the lower bound is the least part cost
    above the probed limit that would change the greedy partition. Splitting a part never makes
    the largest one larger, so "at most K parts" and "K non-empty parts" have the same answer.
    """
    items = len(prefix) - 1
    low = max(
        -(-prefix[-1] // num_parts), max(after - before for before, after in pairwise(prefix))
    )
    high = prefix[-1]
    while low < high:
        limit = (low + high) // 2
        first, realised, next_larger = 0, 0, prefix[-1]
        for _ in range(num_parts):
            last = bisect_right(prefix, prefix[first] + limit) - 1
            realised = max(realised, prefix[last] - prefix[first])
            if last == items:
                break
            next_larger = min(next_larger, prefix[last + 1] - prefix[first])
            first = last
        if last == items:
            high = realised
        else:
            low = next_larger
    return high


def _least_squares_cuts(prefix: list[int], num_parts: int, largest: int) -> list[int]:
    """Return positions 0 = c_0 < c_1 < ... < c_K = L with parts of at most ``largest``.

    State: best[k][c], least sum of squares of k parts that cover the first c items.
    Transition: best[k][c] = min over b < c, prefix[c] - prefix[b] <= largest, of
    best[k-1][b] + (prefix[c] - prefix[b])^2. Base: best[0][0] = 0.
    c_k lies between the rest that K - k greedy parts from the right leave and the reach of k greedy
    parts from the left, which is narrow if the limit binds. Squares satisfy the quadrangle
    inequality, and forbidding long parts preserves it, so the leftmost best b never decreases
    with c: divide and conquer in O(L log L) for each k (Yao 1980).
    """
    ranges = _cut_ranges(prefix, num_parts, largest)
    best = {0: 0}
    choices: list[dict[int, int]] = []
    for low_high, before in zip(ranges[1:], ranges, strict=False):
        best, choice = _best_row(prefix, largest, best, before, low_high)
        choices.append(choice)
    cuts = [len(prefix) - 1]
    for choice in reversed(choices):
        cuts.append(choice[cuts[-1]])
    return cuts[::-1]


def _cut_ranges(prefix: list[int], num_parts: int, largest: int) -> list[tuple[int, int]]:
    """For every k the lowest and highest position where the k-th cut can be."""
    items = len(prefix) - 1
    highest = [0]
    lowest = [items]
    for part in range(1, num_parts + 1):
        reach = bisect_right(prefix, prefix[highest[-1]] + largest) - 1
        highest.append(min(reach, items - (num_parts - part)))
        reach = bisect_left(prefix, prefix[lowest[-1]] - largest)
        lowest.append(max(reach, num_parts - part))
    return list(zip(reversed(lowest), highest, strict=True))


def _best_row(
    prefix: list[int],
    largest: int,
    best: dict[int, int],
    before: tuple[int, int],
    positions: tuple[int, int],
) -> tuple[dict[int, int], dict[int, int]]:
    """One row of the recurrence and the position each entry came from."""
    row: dict[int, int] = {}
    choice: dict[int, int] = {}
    todo = [(*positions, *before)]
    while todo:
        low, high, from_low, from_high = todo.pop()
        if low > high:
            continue
        middle = (low + high) // 2
        end = prefix[middle]
        earliest = max(from_low, bisect_left(prefix, end - largest))
        row[middle], choice[middle] = min(
            (best[start] + (end - prefix[start]) ** 2, start)
            for start in range(earliest, min(from_high, middle - 1) + 1)
        )
        todo.append((low, middle - 1, from_low, choice[middle]))
        todo.append((middle + 1, high, choice[middle], from_high))
    return row, choice
