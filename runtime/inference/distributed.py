"""Forwards of a planned model over several processes, many requests at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from ...capture.capture import default_device
from ...capture.sample import check_module
from ...core.errors import InvalidInput
from ...core.plan.plan import Plan
from ...schedules.plan_schedule import schedule_of
from ..partition.cut import CutModel, cut_for_plan
from ..partition.rank_module import build_rank_module
from ..ranks.failure_detection import ConnectionEnded, FailureDetector
from ..ranks.process_groups import ProcessGroups, check_world, group_timeout
from ..replicas.shared_weights import broadcast_initial_values, find_holders
from ..supported_plans import check_runnable
from .pipeline import room_for
from .rank_worker import FEEDER, Station
from .requests import Requests
from .stage_device import Seat
from .stage_worker import StageWork
from .transport import Letters

LOOK_INTERVAL_S = 0.25


class DistributedInferencePipeline:
    """`InferencePipeline` with a process for every device of the plan, under ``torchrun``.

    Every rank builds the same model and makes one of these. Rank 0 takes the requests and hands
    out the results; the others serve until it is closed::

        init_process_group()
        with DistributedInferencePipeline(model, plan) as pipeline:
            if pipeline.rank == 0:
                for output in pipeline.map(batches):
                    ...
        dist.destroy_process_group()

    Ranks are numbered as for `DistributedPipeline`: all replicas of the first stage, then those of
    the second. Replicas take micro-batches in turn and begin with the weights of the lowest of
    them. Between processes tensors travel by the CPU, on gloo.

    Args:
        model: The model the plan was made for, the same on every rank.
        plan: As for `InferencePipeline`.
        device: Where this rank's stages run; `None` leaves them where the model is.
        group: The ranks, in order; the default group if `None`. Its timeout is how long rank 0
            waits for any result while there are requests, before it asks who is missing.
        sample: As for `InferencePipeline`.
        max_in_flight: Likewise.
        autocast: Likewise.
        pad: Likewise.

    Raises:
        PlanMismatch: The plan is for another model or another number of ranks, its layers are
            reordered, or the model cannot be put into evaluation mode.
        InvalidInput: ``torch.distributed`` is not initialised, or an argument is not what it may
            be.
        RankFailed: Another rank died meanwhile.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        *,
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
        sample: Any = None,
        max_in_flight: int | None = None,
        autocast: torch.dtype | None = None,
        pad: bool = False,
    ) -> None:
        check_module(model)
        check_runnable(plan, "processes")
        self.schedule = schedule_of(plan)
        check_world(self.schedule, group)
        ranks = ProcessGroups(group)
        room = room_for(max_in_flight, sum(map(len, self.schedule.stage_ranks)))
        self.rank, self.plan = ranks.rank, plan
        self.device = torch.device(device) if device is not None else default_device(model)
        pieces = cut_for_plan(model, plan, sample)
        self.stages = {i: pieces.stages[i] for i in self.schedule.stages_of(self.rank)}
        """This rank's stages by index."""
        self.module = build_rank_module(list(self.stages.values())).to(self.device)
        """All parameters and buffers of this rank, under the model's own names."""
        self.module.eval()
        model.eval()
        self._timeout_s = (
            group_timeout(group) or distributed_c10d.default_pg_timeout
        ).total_seconds()
        self._detector = FailureDetector(
            distributed_c10d._get_default_store(), self.rank, ranks.size, group
        )
        try:
            with self._detector.explain_errors():
                # First: torch names a part's groups by how many groups each rank has made before.
                letters = Letters(self.rank, ranks.create_group_of_all("gloo"), ranks.global_ranks)
                self._share_weights(pieces, ranks)
        except BaseException:
            self._detector.close()
            raise
        self._failing, self._ended = threading.Lock(), threading.Event()
        self._failure: BaseException | None = None
        self._station = Station(
            self.schedule, self.rank, letters, self._detector.set_activity, self._fail
        )
        self._requests: Requests | None = None
        if self.rank == FEEDER:
            feed, outcome = self._station.feed, self._station.outcome
            self._requests = Requests(pieces, plan, feed, outcome, room, pad=pad)
        self._station.open(
            {
                index: StageWork(index, stage, Seat(self.device), autocast)
                for index, stage in self.stages.items()
            }
        )
        self._overseer = threading.Thread(target=self._oversee, name="overseer", daemon=True)
        self._overseer.start()

    def submit(self, *args: Tensor, **kwargs: Tensor) -> Future[Any]:
        """Send a batch on its way, on rank 0; see `InferencePipeline.submit`.

        The output is on the CPU, unless rank 0 has the last stage. A batch that was cancelled is
        left out by the stages of rank 0; what was sent already is computed and dropped.

        Raises:
            InvalidInput: The batch is not what the model takes, the pipeline is closed, or this is
                another rank.
            RankFailed: A process is gone; the message names it. So do the futures under way.
        """
        return self._desk.submit(args, kwargs)

    def map(self, batches: Iterable[Any]) -> Iterator[Any]:
        """The outputs of a stream of batches, in order, on rank 0; see `InferencePipeline.map`."""
        return self._desk.map(batches)

    def close(self) -> None:
        """On rank 0: wait for what is under way, and dismiss the others. There: serve until then.

        Raises:
            RankFailed: A rank died or stopped answering; the message names it.
        """
        self._close(is_abandoned=False)

    def _close(self, *, is_abandoned: bool) -> None:
        if self._requests is not None:
            self._requests.close(is_abandoned=is_abandoned)
            self._station.dismissed.set()
        while not self._station.dismissed.wait(LOOK_INTERVAL_S):
            pass  # so that an interrupt is heard
        self._station.close(until=lambda: self._failure is not None)
        self._leave()
        if self._failure is not None:
            raise self._failure

    def _leave(self) -> None:
        self._ended.set()
        self._overseer.join()
        self._detector.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self._close(is_abandoned=False)
        elif self._requests is not None and self._failure is None:
            self._close(is_abandoned=True)
        else:  # the others hear of it, and that this rank is gone
            self._fail(error)
            self._leave()

    @property
    def _desk(self) -> Requests:
        if self._requests is None:
            raise InvalidInput(
                f"rank {FEEDER} takes the requests; on rank {self.rank} leave the with block or "
                f"call close(), which serves until rank {FEEDER} is closed"
            )
        return self._requests

    def _share_weights(self, pieces: CutModel, ranks: ProcessGroups) -> None:
        """All holders of a weight begin with the same values."""
        parameters = pieces.captured.graph.parameters
        stage_of = [stage for stage, count in enumerate(self.plan.balance) for _ in range(count)]
        sets = {find_holders(record, stage_of, self.schedule) for record in parameters}
        groups = ranks.create_groups(each for each in sets if len(each) > 1)
        broadcast_initial_values(parameters, stage_of, self.schedule, self.module, groups)

    def _oversee(self) -> None:
        """Find out what no message tells: that another rank is lost, or that nothing comes back."""
        last, since_s = (0, 0), time.monotonic()
        while not self._ended.wait(LOOK_INTERVAL_S):
            if self._detector.has_verdict:
                self._fail(ConnectionEnded("given up by another rank"))
            now_s = time.monotonic()
            numbered, delivered = (0, 0) if self._requests is None else self._requests.progress
            if delivered == numbered or delivered != last[1]:
                since_s = now_s
            elif now_s - since_s > self._timeout_s:
                self._detector.set_activity(f"the wait for the result of micro-batch {delivered}")
                self._fail(ConnectionEnded(f"no result within {self._timeout_s:g} s"))
            last = numbered, delivered

    def _fail(self, error: BaseException) -> None:
        """End everything here with an error that names the rank that failed."""
        with self._failing:
            if self._failure is not None or self._ended.is_set():
                return
            try:
                with self._detector.explain_errors():
                    raise error
            except BaseException as explained:  # noqa: BLE001 (raised by the main thread)
                self._failure = explained
        if self._requests is not None:
            self._requests.fail(self._failure)
        self._station.dismissed.set()
