"""A rank of a pipeline: its process groups, its barriers and its failure detector."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from ...core.plan.schedule import Schedule
from ...core.units import count
from .consistency import Facts, check_consistency
from .failure_detection import FailureDetector
from .process_groups import ProcessGroups


class PipelineRank:
    """One rank among those of a pipeline, in the order of a group or of the default group.

    Attributes:
        schedule: Every rank's order of work; set by subclasses, as is ``device``.
        rank: This rank's number in the group.
        device: Where this rank works.
        steps: Steps taken, which keyed dropout follows; set it when resuming.
    """

    schedule: Schedule
    device: torch.device

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.steps = self._agreements = 0
        self._group = group
        self._ranks = ProcessGroups(group)
        self.rank = self._ranks.rank
        store = distributed_c10d._get_default_store()
        self._detector = FailureDetector(store, self.rank, self._ranks.size, group)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Return the ranks' group; `None` for the default group."""
        return self._group

    @property
    def diagnosing(self) -> bool:
        """Return True while it finds out which rank failed; a signal handler should wait."""
        return self._detector.is_diagnosing

    def barrier(self) -> None:
        """Wait until every rank has arrived.

        Raises:
            RankFailed: A rank never arrived; the message names it.
        """
        with self.during("a barrier"):
            dist.barrier(self._group)

    def check_agreement(self, facts: Facts) -> None:
        """Check that facts are equal on all ranks; called on every rank.

        Raises:
            PlanMismatch: Some ranks differ from most; it says which and in what.
            RankFailed: A rank died; the message names it.
        """
        self._agreements += 1
        topic = f"{' and '.join(facts)} ({self._agreements})"
        with self.during("comparing"):
            check_consistency(self._detector, facts, "", topic=topic)

    def share_results(self, loss: Tensor | None, elapsed_s: float) -> tuple[float, float]:
        """Return the last stage's loss and the slowest rank's time, on every rank.

        Raises:
            RankFailed: A rank died; the message names it.
        """
        last = self.schedule.stage_ranks[-1][0]
        mean = loss if loss is not None else torch.zeros(())
        figures = torch.tensor([float(mean), elapsed_s], dtype=torch.float64, device=self.device)
        with self.during("sharing the loss"):
            dist.broadcast(figures[:1], group_src=last, group=self._group)
            dist.all_reduce(figures[1:], op=dist.ReduceOp.MAX, group=self._group)
        return float(figures[0]), float(figures[1])

    def close(self) -> None:
        """Stop the failure detector and destroy the process groups created here.

        Call it on every rank before destroying the process group they share; leaving a ``with``
        block does. After an error the groups are kept: destroying them, or exiting normally, may
        wait for ranks that are gone; see `end_process`.
        """
        self._detector.finish()
        if not self._detector.has_failed:
            self._ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
        else:
            self._detector.announce_end(error)
            self._detector.close()

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Raise failures of communication inside as `RankFailed`, with this rank's activity."""
        self._detector.set_activity(activity)
        with self._detector.explain_errors():
            yield
        self._detector.set_activity(f"its own work after {count(self.steps, 'step')}")
