"""Pipelined inference of a planned model over several processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
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
from ..engine.rank_facts import list_facts
from ..partition.cut import CutModel, cut_for_plan
from ..partition.rank_module import build_rank_module
from ..ranks.consistency import check_consistency
from ..ranks.device_placement import choose_device, uses_nccl
from ..ranks.failure_detection import ConnectionEnded, FailureDetector
from ..ranks.process_groups import (
    ProcessGroups,
    check_initialised,
    check_world,
    group_timeout,
)
from ..replicas.shared_weights import WeightPlacement
from ..supported_plans import check_runnable, check_stateful_replicas
from .pipeline import resolve_max_in_flight
from .rank_worker import REQUEST_RANK, RankWorker
from .requests import RequestDispatcher
from .stage_device import InferenceDevice
from .stage_worker import InferenceStage
from .transport import MicrobatchTransport

POLL_INTERVAL_S = 0.25


class DistributedInferencePipeline:
    """Pipelined inference with one process per device of the plan, under ``torchrun``.

    Every rank builds the same model and creates one pipeline. Rank 0 accepts the requests and
    returns the results; the other ranks serve until it closes the pipeline::

        init_process_group()
        with DistributedInferencePipeline(model, plan) as pipeline:
            if pipeline.rank == 0:
                for output in pipeline.map(batches):
                    ...
        dist.destroy_process_group()

    Ranks are numbered as for `DistributedPipeline`: all replicas of the first stage, then those of
    the second, and so on. Replicas take micro-batches in turn and start with the weights of the
    lowest-ranked replica. Tensors travel between processes through CPU memory, with gloo.

    Args:
        model: The model the plan was made for, the same on every rank.
        plan: As for `InferencePipeline`.
        device: Device of this rank's stages. `None` leaves them where the model is; with NCCL, a
            model on the CPU goes to the current GPU.
        group: The ranks, in order; the default group if `None`. Its timeout limits how long
            rank 0 waits for a result before it finds out which rank is lost.
        sample: As for `InferencePipeline`.
        max_in_flight: As for `InferencePipeline`.
        autocast: As for `InferencePipeline`.
        pad: As for `InferencePipeline`.

    Attributes:
        stages: This rank's stages by index.
        module: All parameters and buffers of this rank, under the model's own names.

    Raises:
        PlanMismatch: The plan is for another model or another number of ranks, its layers are
            reordered, or the model cannot be put into evaluation mode.
        InvalidInput: ``torch.distributed`` is not initialised, or an argument is invalid.
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
        check_initialised(plan)
        ranks = ProcessGroups(group)
        self.rank, self.plan = ranks.rank, plan
        self._timeout_s = (
            group_timeout(group) or distributed_c10d.default_pg_timeout
        ).total_seconds()
        self._detector = FailureDetector(
            distributed_c10d._get_default_store(), self.rank, ranks.size, group
        )
        try:
            with self._detector.explain_errors():
                check_module(model)
                check_runnable(plan, "whole layers")
                self.schedule = schedule_of(plan)
                check_world(plan.num_stages, len(self.schedule.ranks), group)
                num_workers = sum(map(len, self.schedule.stage_ranks))
                limit = resolve_max_in_flight(max_in_flight, num_workers)
                self.device = _choose_device(model, device, group)
                cut_model = cut_for_plan(model, plan, sample)
                graph = cut_model.captured.graph
                check_stateful_replicas(
                    graph.layers, plan, [len(ranks) for ranks in self.schedule.stage_ranks]
                )
                facts = list_facts(model, graph, plan, self.schedule, {"autocast": autocast})
                check_consistency(self._detector, facts, plan.content_id())
                transport = self._place(model, cut_model, ranks)
        except BaseException:
            self._detector.close()
            raise
        self._failing, self._ended = threading.Lock(), threading.Event()
        self._failure: BaseException | None = None
        self._worker = RankWorker(
            self.schedule, self.rank, transport, self._detector.set_activity, self._fail
        )
        self._dispatcher: RequestDispatcher | None = None
        if self.rank == REQUEST_RANK:
            feed, results = self._worker.feed, self._worker.results
            self._dispatcher = RequestDispatcher(cut_model, plan, feed, results, limit, pad=pad)
        self._worker.open(
            {
                index: InferenceStage(index, stage, InferenceDevice(self.device), autocast)
                for index, stage in self.stages.items()
            }
        )
        self._monitor_thread = threading.Thread(target=self._monitor, name="monitor", daemon=True)
        self._monitor_thread.start()

    def _place(
        self, model: nn.Module, cut_model: CutModel, ranks: ProcessGroups
    ) -> MicrobatchTransport:
        """Keep this rank's stages, with the weights of their lowest rank, and connect the ranks."""
        self.stages = {i: cut_model.stages[i] for i in self.schedule.stages_of(self.rank)}
        self.module = build_rank_module(list(self.stages.values())).to(self.device)
        self.module.eval()
        model.eval()
        # First: torch names a part's groups by how many groups each rank has made before.
        transport = MicrobatchTransport(
            self.rank, ranks.create_group_of_all("gloo"), ranks.global_ranks
        )
        records = cut_model.captured.graph.parameters
        placement = WeightPlacement(records, self.plan.balance, self.schedule)
        placement.broadcast_initial_values(self.module, ranks, self.device)
        return transport

    def submit(self, *args: Tensor, **kwargs: Tensor) -> Future[Any]:
        """Submit a batch on rank 0; see `InferencePipeline.submit`.

        The output is on the CPU, unless rank 0 has the last stage. Only the stages of rank 0 skip
        cancelled batches; those already sent are computed and their results dropped.

        Raises:
            InvalidInput: The batch does not fit the model, the pipeline is closed, or this is not
                rank 0.
            RankFailed: A process is gone; the message names it. The futures in flight raise it,
                too.
        """
        return self._dispatcher_of_rank_0.submit(args, kwargs)

    def map(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the outputs of a stream of batches on rank 0; see `InferencePipeline.map`."""
        return self._dispatcher_of_rank_0.map(batches)

    def close(self) -> None:
        """Wait for requests in flight and dismiss the other ranks; on those, serve until then.

        Raises:
            RankFailed: A rank died or stopped answering; the message names it.
        """
        self._close(is_abandoned=False)

    def _close(self, *, is_abandoned: bool) -> None:
        if self._dispatcher is not None:
            self._dispatcher.close(is_abandoned=is_abandoned)
            self._worker.dismissed.set()
        while not self._worker.dismissed.wait(POLL_INTERVAL_S):
            pass  # a wait without timeout would block Ctrl-C
        self._worker.close(until=lambda: self._failure is not None)
        self._leave()
        if self._failure is not None:
            raise self._failure

    def _leave(self) -> None:
        self._ended.set()
        self._monitor_thread.join()
        self._detector.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            self._close(is_abandoned=False)
        elif self._dispatcher is not None and self._failure is None:
            self._close(is_abandoned=True)
        else:  # tells the other ranks why this one is gone
            self._fail(error)
            self._leave()

    @property
    def _dispatcher_of_rank_0(self) -> RequestDispatcher:
        if self._dispatcher is None:
            raise InvalidInput(
                f"only rank {REQUEST_RANK} accepts requests; on rank {self.rank}, leave the with "
                f"block or call close(), which serves until rank {REQUEST_RANK} closes the pipeline"
            )
        return self._dispatcher

    def _monitor(self) -> None:
        """Detect lost ranks and missing results, of which no message informs this rank."""
        last, since_s = (0, 0), time.monotonic()
        while not self._ended.wait(POLL_INTERVAL_S):
            if self._detector.has_verdict:
                self._fail(ConnectionEnded("another rank gave up"))
            now_s = time.monotonic()
            # The clock runs only while requests wait and no result has come since the last look.
            numbered, delivered = (0, 0) if self._dispatcher is None else self._dispatcher.progress
            if delivered == numbered or delivered != last[1]:
                since_s = now_s
            elif now_s - since_s > self._timeout_s:
                self._detector.set_activity(f"the wait for the result of micro-batch {delivered}")
                self._fail(ConnectionEnded(f"no result within {self._timeout_s:g} s"))
            last = numbered, delivered

    def _fail(self, error: BaseException) -> None:
        """Fail all requests here with an error that names the rank that failed."""
        with self._failing:
            # Several threads may notice one loss, and only the first error explains it; once the
            # end has begun, broken connections are expected.
            if self._failure is not None or self._ended.is_set():
                return
            try:
                with self._detector.explain_errors():
                    raise error
            except BaseException as explained:  # noqa: BLE001 (raised by the main thread)
                self._failure = explained
        if self._dispatcher is not None:
            self._dispatcher.fail(self._failure)
        self._worker.dismissed.set()


def _choose_device(
    model: nn.Module, wanted: torch.device | str | None, group: dist.ProcessGroup | None
) -> torch.device:
    # Requests travel through the CPU; only the initial weights use the ranks' own backend.
    if uses_nccl(group):
        return choose_device(model, group, wanted)
    return torch.device(wanted) if wanted is not None else default_device(model)
