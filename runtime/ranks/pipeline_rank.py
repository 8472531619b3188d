"""A rank of a pipeline: its process groups, its barriers and its failure detector."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from ...core.errors import RankFailed
from ...core.plan.schedule import Schedule
from ...core.units import count
from .communicator_watcher import CommunicatorWatcher
from .consistency import Facts, check_consistency
from .device_placement import waits_on_device
from .failure_detection import FailureDetector
from .process_groups import ProcessGroups, group_timeout
from .rank_grid import RankGrid


class PipelineRank:
    """One rank among those of a pipeline, in the order of a group or of the default group.

    Attributes:
        schedule: Every rank's order of work; set by subclasses, as are ``device`` and ``grid``.
        grid: The ranks that share each rank of the schedule.
        rank: This rank's number in the group.
        device: Where this rank works.
        steps: Steps taken, which keyed dropout follows; set it when resuming.
    """

    schedule: Schedule
    grid: RankGrid
    device: torch.device

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.steps = self._agreements = 0
        self._group = group
        self._ranks = ProcessGroups(group)
        self.rank = self._ranks.rank
        store = distributed_c10d._get_default_store()
        self._detector = FailureDetector(store, self.rank, self._ranks.size, group)
        self._watcher: CommunicatorWatcher | None = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Return a group of the pipeline's ranks; `None` for the default group."""
        return self._group

    @property
    def first_of_last_stage(self) -> int:
        """Return the lowest-numbered rank that has the loss."""
        return self.grid.ranks_of(self.schedule.stage_ranks[-1][0])[0]

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
            self._meet()

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
        with self.during("sharing the loss"):
            figures = torch.zeros(2, dtype=torch.float64, device=self.device)
            figures[1] = elapsed_s
            if loss is not None:
                figures[0] = loss
            dist.broadcast(figures[:1], group_src=self.first_of_last_stage, group=self._group)
            dist.all_reduce(figures[1:], op=dist.ReduceOp.MAX, group=self._group)
            shared_loss, slowest_s = figures.tolist()
        return shared_loss, slowest_s

    def close(self) -> None:
        """Stop the failure detector and destroy the process groups created here.

        Call it on every rank before destroying the process group they share; leaving a ``with``
        block does. After an error the groups are kept: destroying them, or exiting normally, may
        wait for ranks that are gone; see `end_process`.
        """
        if self._watcher is not None and not self._detector.has_failed:
            # A process that ended now would take along what its GPU still has to send. Ranks that
            # are gone by now have taken what they needed.
            with suppress(RankFailed), self.during("the wait for the device"):
                torch.cuda.synchronize(self.device)
        self._detector.finish()
        self._stop_watching()
        if not self._detector.has_failed:
            self._ranks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self.close()
        else:
            self._detector.announce_end(error)
            self._stop_watching()
            self._detector.close()

    def _start_watching(self) -> None:
        """Watch for lost ranks on NCCL; called on every rank, before it creates groups."""
        if self._ranks.size == 1 or not waits_on_device(self._group):
            return
        timeout = group_timeout(self._group) or distributed_c10d.default_pg_timeout
        # The pipeline's own, since the watcher must not abort a group that others use.
        self._group = self._ranks.create_group_of_all()
        self._watcher = CommunicatorWatcher(
            self._detector, timeout.total_seconds(), self._ranks.abort
        )

    def _meet(self) -> None:
        device = self.device
        dist.barrier(self._group, device_ids=[device.index] if device.type == "cuda" else None)

    def _wait_for_device(self) -> None:
        """Wait for what was launched where the watcher would end a wait for a lost rank."""
        if self._watcher is not None:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self.device))
            event.synchronize()

    def _stop_watching(self) -> None:
        if self._watcher is not None:
            self._watcher.close()

    @contextmanager
    def during(self, activity: str, *, patience: float = 1.0) -> Iterator[None]:
        """Raise failures of communication inside as `RankFailed`, with this rank's activity.

        On NCCL the activity may take ``patience`` times the group's timeout: there one limit stands
        for both the waits and a rank's own work between them.
        """
        self._detector.set_activity(activity)
        self._detector.patience = patience
        with self._detector.explain_errors():
            yield
        self._detector.patience = 1.0
        self._detector.set_activity(f"its own work after {count(self.steps, 'step')}")
