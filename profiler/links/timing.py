"""Times of messages and all-reduces of growing size, taken by the participating ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Literal

import torch.distributed as dist

from .rank_group import RankGroup
from .records import LinkTime

SMALLEST_BYTES = 2**10
STEP = 4
ECHO_BYTES = 4
"""The answer to a message."""

WARM_UPS = 2
LEAST_REPEATS = 3
MOST_REPEATS = 51
ENOUGH_BYTES = 2**20
"""Messages so large are timed however little time there is."""


def sizes_up_to(largest_bytes: int) -> list[int]:
    """Sizes of messages to time: from 1 KiB in steps of four."""
    sizes = [SMALLEST_BYTES]
    while sizes[-1] * STEP <= largest_bytes:
        sizes.append(sizes[-1] * STEP)
    return sizes


def time_messages(
    group: RankGroup, source: int, target: int, sizes: Sequence[int], budget_s: float
) -> list[LinkTime]:
    """One-way times of messages; source and target call it, the target learns nothing.

    Each message is answered by four bytes, whose own time, half of such an exchange, is taken
    off. Sizes that the budget does not allow are left out.
    """
    answer = group.buffer(ECHO_BYTES)
    is_source = group.rank == source
    other = target if is_source else source

    def exchange(size_bytes: int) -> Callable[[], None]:
        message = group.buffer(size_bytes)

        def run() -> None:
            if is_source:
                dist.send(message, other)
                dist.recv(answer, other)
            else:
                dist.recv(message, other)
                dist.send(answer, other)
            group.settle()

        return run

    def agree(repeats: int) -> int:
        number = group.number(repeats)
        if is_source:
            dist.send(number, other)
        else:
            dist.recv(number, other)
        return int(number.item())

    sizes = [ECHO_BYTES, *sizes]
    found = _sweep(group, "message", (source, target), sizes, exchange, agree, budget_s)
    if not is_source or not found:
        return []
    echo_s = found[0].time_s / 2
    # An echo slower than the exchange it is part of is noise; half of the exchange is no more than
    # what an empty message takes.
    return [_without(echo_s, one) for one in found[1:]]


def _without(echo_s: float, one: LinkTime) -> LinkTime:
    time_s = max(one.time_s - echo_s, one.time_s / 2)
    least_s = max(one.least_s - echo_s, one.least_s / 2)
    return one.model_copy(update={"time_s": time_s, "least_s": min(least_s, time_s)})


def time_all_reduces(
    group: RankGroup, ranks: tuple[int, ...], sizes: Sequence[int], budget_s: float
) -> list[LinkTime]:
    """Time all-reduces over some ranks as this rank sees them; all of these ranks call it.

    Every rank has called ``group.subgroup(ranks)`` before.
    """
    members = group.subgroup(ranks)

    def reduce(size_bytes: int) -> Callable[[], None]:
        buffer = group.buffer(size_bytes)

        def run() -> None:
            dist.all_reduce(buffer, group=members)
            group.settle()

        return run

    def agree(repeats: int) -> int:
        number = group.number(repeats)
        dist.broadcast(number, src=ranks[0], group=members)
        return int(number.item())

    return _sweep(group, "all_reduce", ranks, sizes, reduce, agree, budget_s)


def _sweep(
    group: RankGroup,
    what: Literal["message", "all_reduce"],
    ranks: tuple[int, ...],
    sizes: Sequence[int],
    prepare: Callable[[int], Callable[[], None]],
    agree: Callable[[int], int],
    budget_s: float,
) -> list[LinkTime]:
    """Median times by size; one rank decides how often to repeat, and ``agree`` tells the rest."""
    found: list[LinkTime] = []
    deadline = time.perf_counter() + budget_s
    plural = "messages" if what == "message" else "sums"
    for size_bytes in sizes:
        with group.waiting_for(ranks, f"in {plural} of {size_bytes} bytes"):
            repeats = agree(_affordable(found, size_bytes, deadline - time.perf_counter()))
            if repeats < LEAST_REPEATS:
                break
            run = prepare(size_bytes)
            for _ in range(WARM_UPS):
                run()
            times_s = _times(run, repeats)
            found.append(
                LinkTime(
                    what=what,
                    ranks=ranks,
                    size_bytes=size_bytes,
                    time_s=median(times_s),
                    least_s=min(times_s),
                    repeats=repeats,
                )
            )
    return found


def _affordable(found: Sequence[LinkTime], size_bytes: int, left_s: float) -> int:
    """Repeats of the next size that take half of the time left; 0 for one too long.

    The next size is expected to take what the last two suggest. Up to `ENOUGH_BYTES` a few runs
    are made whatever the time left: less would say nothing of bandwidth.
    """
    if len(found) < 2:
        return MOST_REPEATS
    before, last = found[-2:]
    slope = max(last.time_s - before.time_s, 0.0) / (last.size_bytes - before.size_bytes)
    expected_s = max(last.time_s + slope * (size_bytes - last.size_bytes), 1e-9)
    if size_bytes > ENOUGH_BYTES and expected_s * (WARM_UPS + LEAST_REPEATS) > left_s:
        return 0
    repeats = int(left_s / 2 / expected_s) - WARM_UPS
    return min(max(repeats, LEAST_REPEATS), MOST_REPEATS)


def _times(run: Callable[[], None], repeats: int) -> list[float]:
    times_s = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - start)
    return times_s
