"""The ranks of a process group that share the work of each rank of a schedule.

A schedule knows one rank for each replica of a stage. With tensor parallelism several ranks of the
group do its work together, each with its shard of every layer. They have consecutive numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ...core.plan.plan import Plan
from ...core.plan.schedule import Schedule
from ...schedules.plan_schedule import count_sharing_ranks
from .process_groups import RankSet


@dataclass(frozen=True)
class RankGrid:
    """Numbering of the ranks of a process group; ``widths`` holds how many share each rank.

    Unless said otherwise methods take and return ranks of the group; those of the schedule are
    called scheduled.
    """

    widths: tuple[int, ...]

    @property
    def size(self) -> int:
        """Return the number of ranks of the group."""
        return sum(self.widths)

    @property
    def is_shared(self) -> bool:
        """Return True if several ranks share one of the schedule."""
        return max(self.widths) > 1

    def locate(self, rank: int) -> tuple[int, int]:
        """Return the scheduled rank whose work a rank shares, and the number of its shard."""
        for scheduled, end in enumerate(accumulate(self.widths)):
            if rank < end:
                return scheduled, rank - (end - self.widths[scheduled])
        raise IndexError(f"rank {rank} of {self.size}")

    def ranks_of(self, scheduled: int) -> RankSet:
        """Return the ranks that share a scheduled rank, by shard."""
        first = sum(self.widths[:scheduled])
        return tuple(range(first, first + self.widths[scheduled]))

    def with_shard(self, scheduled: Sequence[int], shard: int) -> RankSet:
        """Return the rank of each scheduled rank that has this shard; their widths are equal."""
        return tuple(self.ranks_of(each)[shard] for each in scheduled)

    def sender_to(self, rank: int, scheduled: int) -> int:
        """Return which rank of a scheduled one sends messages to ``rank``.

        All of them have the same values, so that each receiver needs them from one.
        """
        _, shard = self.locate(rank)
        ranks = self.ranks_of(scheduled)
        return ranks[shard % len(ranks)]

    def receivers_from(self, rank: int, scheduled: int) -> RankSet:
        """Return the ranks of a scheduled one that ``rank`` sends messages to; maybe none."""
        sharing, _ = self.locate(rank)
        return tuple(
            each for each in self.ranks_of(scheduled) if self.sender_to(each, sharing) == rank
        )


def grid_of(plan: Plan, schedule: Schedule) -> RankGrid:
    """Return the grid of a plan's ranks; see `count_sharing_ranks`."""
    return RankGrid(count_sharing_ranks(plan, schedule))
