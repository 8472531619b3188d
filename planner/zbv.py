"""The order of work of the V-shaped zero-bubble schedule."""

from __future__ import annotations

from collections import Counter

from ..core.schedule import Work

ChunkAction = tuple[int, Work, int]
"""Chunk (0 on the way up, 1 on the way back), work and micro-batch."""


def zbv_actions(position: int, positions: int, num_microbatches: int) -> list[ChunkAction]:
    """What the rank at one place of the V does (Qi et al. 2023, section 6).

    As ``ScheduleZBVZeroBubble`` of torch: drawn for at least 2 P - 1 micro-batches, of which
    those that do not exist are left out.
    """
    enough = max(2 * positions - 1, num_microbatches)
    rank = _Rank()
    for _ in range(2 * (positions - position) - 1):
        rank.does(0, Work.FORWARD)
    for _ in range(position):
        rank.does(1, Work.FORWARD)
        rank.does(0, Work.FORWARD)
    for _ in range(positions - position):
        rank.does(1, Work.FORWARD, Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT)
    while rank.done[1, Work.FORWARD] < enough:
        if rank.done[0, Work.FORWARD] < enough:
            rank.does(0, Work.FORWARD)
        rank.does(0, Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT)
        rank.does(1, Work.FORWARD, Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT)
    for _ in range(position):
        rank.does(0, Work.BACKWARD_INPUT)
        rank.does(1, Work.BACKWARD_INPUT)
    for _ in range(positions - position):
        rank.does(0, Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT)
    for chunk in (1, 0):
        while rank.done[chunk, Work.BACKWARD_WEIGHT] < enough:
            rank.does(chunk, Work.BACKWARD_WEIGHT)
    return [action for action in rank.actions if action[2] < num_microbatches]


class _Rank:
    """Actions so far; every kind takes the micro-batches in order."""

    def __init__(self) -> None:
        self.actions: list[ChunkAction] = []
        self.done: Counter[tuple[int, Work]] = Counter()

    def does(self, chunk: int, *works: Work) -> None:
        for work in works:
            self.actions.append((chunk, work, self.done[chunk, work]))
            self.done[chunk, work] += 1
