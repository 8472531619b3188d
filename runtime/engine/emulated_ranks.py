"""All ranks of a plan emulated in one process, in the exact order of its schedule."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...capture.program.segment import Segment, get_constants
from ...core.plan.plan import Plan
from ...core.plan.schedule import Schedule
from ..batchnorm.fixed_buffers import FixedBuffers
from ..batchnorm.running_statistics import BatchStatistics, RunningStatistics
from ..partition.cut import CutModel
from ..partition.rank_module import build_rank_module
from ..random_state import RandomState
from ..ranks.collective import Pending
from ..ranks.process_groups import RankSet
from ..replicas.gradient_sync import GradientSync
from ..replicas.replication import Replication
from ..replicas.shared_weights import find_holders, shared_weights
from .executor import Executor, StepCoroutine
from .p2p import Message, check_message
from .stage import LossOfFlat, StageRunner

RandomStates = dict[int, RandomState]
"""The random state from which each micro-batch's next forward draws."""


@dataclass(frozen=True)
class _Rank:
    """One emulated rank.

    Attributes:
        module: Everything it holds, under the model's names.
        executor: Runs its stages.
    """

    module: nn.Module
    executor: Executor


class EmulatedRanks:
    """The ranks of a pipeline in one process, whose executors are resumed in turn.

    Each rank has stages of its own, copied where several ranks hold the same weights, and messages
    are copied between ranks. Gradients and running statistics are combined as over process groups.
    Replicas always sum whole gradients, even where the plan shards weights.

    Random numbers follow the micro-batch: each draws on from stage to stage as in the unsplit
    model, whatever else is in flight.

    Args:
        pieces: The cut model, whose stages are used.
        plan: The plan it was cut for.
        schedule: The order of work.
        loss: Computes a share of the loss from the last stage's outputs and a target.
        device: Where the stages run.
        policy: Policy for running statistics.
    """

    def __init__(
        self,
        pieces: CutModel,
        plan: Plan,
        schedule: Schedule,
        *,
        loss: LossOfFlat,
        device: torch.device,
        policy: BatchStatistics = "microbatch",
    ) -> None:
        self._schedule, self._store = schedule, MessageStore()
        self._random: RandomStates = {}
        self.current_activity = ""
        """Description of what the rank resumed last did."""
        build = _RankBuilder(
            pieces, plan, schedule, loss, device, policy, self._store, self._random
        )
        self._ranks = [build.rank(rank, self._set_activity) for rank in range(len(schedule.ranks))]

    @property
    def modules(self) -> list[nn.Module]:
        """Return each rank's parameters and buffers."""
        return [rank.module for rank in self._ranks]

    def train(
        self,
        inputs: Sequence[Sequence[Tensor]],
        targets: Sequence[Any],
        random: Mapping[int, RandomState],
    ) -> float:
        """Run one training step and return the batch's mean loss.

        Args:
            inputs: Flat inputs of each micro-batch.
            targets: Target of each micro-batch.
            random: The random state before each micro-batch.
        """
        return self._run(
            [r.executor.iterate_training(inputs, targets) for r in self._ranks], random
        )

    def evaluate(
        self,
        inputs: Sequence[Sequence[Tensor]],
        targets: Sequence[Any],
        random: Mapping[int, RandomState],
    ) -> float:
        """Run the forwards alone and return the batch's mean loss; see `train`."""
        steps = [r.executor.iterate_evaluation(inputs, targets, {}) for r in self._ranks]
        return self._run(steps, random)

    def _run(self, steps: Sequence[StepCoroutine], random: Mapping[int, RandomState]) -> float:
        self._random.clear()
        self._random.update(random)
        _run_in_turn(steps, self._store)
        # Every rank has started its collectives by now, so waiting for them cannot block.
        for step in steps:
            for _ in step:
                pass
        return float(sum(float(loss) for rank in self._ranks for loss in rank.executor.losses))

    def _set_activity(self, activity: str) -> None:
        self.current_activity = activity


def _run_in_turn(steps: Sequence[StepCoroutine], store: MessageStore) -> None:
    """Let every rank go as far as it can, again and again, until all actions are done."""
    awaited = [next(step) for step in steps]
    while any(messages is not None for messages in awaited):
        moved = False
        for rank, step in enumerate(steps):
            while (messages := awaited[rank]) is not None and store.has(messages):
                awaited[rank] = next(step)
                moved = True
        # `schedules.validate` has simulated this very order, so no rank can be stuck here.
        assert moved, "a schedule that was found to finish does not"


class _RankBuilder:
    """Builds the emulated ranks of one pipeline."""

    def __init__(
        self,
        pieces: CutModel,
        plan: Plan,
        schedule: Schedule,
        loss: LossOfFlat,
        device: torch.device,
        policy: BatchStatistics,
        store: MessageStore,
        random: RandomStates,
    ) -> None:
        self._pieces, self._plan, self._schedule = pieces, plan, schedule
        self._loss, self._device, self._policy = loss, device, policy
        self._store, self._random = store, random
        self._taken: set[int] = set()
        self._stage_of = [s for s, count in enumerate(plan.balance) for _ in range(count)]
        records = pieces.captured.graph.parameters
        sets = {find_holders(record, self._stage_of, schedule) for record in records}
        sets.update(schedule.stage_ranks)
        self._points = {ranks: SynchronisationPoint(len(ranks)) for ranks in sets if len(ranks) > 1}
        # One per stage, not per set of ranks: calls are matched by their number, and a stage that
        # shares nothing makes none.
        self._statistics = [SynchronisationPoint(len(ranks)) for ranks in schedule.stage_ranks]

    def rank(self, rank: int, set_activity: Callable[[str], None]) -> _Rank:
        stages = self._take_stages(rank)
        module = build_rank_module(list(stages.values()))
        collectives: dict[RankSet, EmulatedCollective] = {
            ranks: EmulatedCollective(point, ranks.index(rank))
            for ranks, point in self._points.items()
            if rank in ranks
        }
        records = self._pieces.captured.graph.parameters
        weights = shared_weights(records, self._stage_of, self._schedule, module)
        gradient_sync = GradientSync(weights, collectives, stages) if weights else None
        routes, last = self._pieces.routes, self._plan.num_stages - 1
        runners = {
            index: _EmulatedStage(
                stage,
                routes.received(index) if index else self._plan.inputs,
                routes.sent(index),
                self._loss if index == last else None,
                self._device,
                self._running_statistics(index, stage, rank),
                fixed=FixedBuffers(stage) if len(self._schedule.stage_ranks[index]) > 1 else None,
            )
            for index, stage in stages.items()
        }
        for runner in runners.values():
            runner.random = self._random
        executor = Executor(
            self._schedule,
            rank,
            routes,
            runners,
            EmulatedTransport(self._store),
            Replication(gradient_sync, {}),
            set_activity,
        )
        return _Rank(module, executor)

    def _take_stages(self, rank: int) -> dict[int, Segment]:
        """Return a rank's stages, as copies if an earlier rank holds any of their tensors."""
        stages = {index: self._pieces.stages[index] for index in self._schedule.stages_of(rank)}
        tensors = {id(tensor) for stage in stages.values() for tensor in _tensors(stage)}
        if tensors & self._taken:
            stages = copy.deepcopy(stages)  # all at once: weights tied within the rank stay tied
        self._taken |= tensors
        return stages

    def _running_statistics(
        self, index: int, stage: Segment, rank: int
    ) -> RunningStatistics | None:
        replicas = self._schedule.stage_ranks[index]
        position = replicas.index(rank)
        found = RunningStatistics(
            stage,
            self._policy,
            self._schedule.num_microbatches,
            len(replicas),
            EmulatedCollective(self._statistics[index], position) if len(replicas) > 1 else None,
        )
        return found if found.is_needed else None


class _EmulatedStage(StageRunner):
    """A stage whose random numbers follow the micro-batch."""

    random: RandomStates

    def forward(self, microbatch: int, *args: Any, **kwargs: Any) -> list[Any]:
        # Processes draw from generators of their own. Here one generator serves all ranks, and
        # micro-batches in flight take turns at it.
        self.random[microbatch].restore(self._device)
        made = super().forward(microbatch, *args, **kwargs)
        self.random[microbatch] = RandomState.now(self._device)
        return made


def _tensors(stage: Segment) -> Iterator[Tensor]:
    yield from stage.parameters()
    yield from stage.buffers()
    yield from get_constants(stage).values()


class MessageStore:
    """Messages between emulated ranks that have not been received yet."""

    def __init__(self) -> None:
        self._waiting: dict[Message, list[Tensor]] = {}

    def has(self, messages: Sequence[Message]) -> bool:
        return all(message in self._waiting for message in messages)

    def put(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Store copies, as a message between machines is one."""
        self._waiting[message] = [tensor.clone() for tensor in tensors]

    def take(self, message: Message) -> list[Tensor]:
        return self._waiting.pop(message)


class EmulatedTransport:
    """The `MessageTransport` of one emulated rank."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store

    def begin(self, expected: Sequence[Sequence[Message]]) -> None:
        """Do nothing: there are no receives to post."""

    def send(self, message: Message, receiver: int, tensors: Sequence[Tensor]) -> None:
        """Store a message after the checks that real channels make."""
        check_message(message, tensors)
        for tensor in tensors:
            assert tensor.is_contiguous(), "a stage's boundary makes what it sends contiguous"
        self._store.put(message, tensors)

    def receive(self, message: Message, sender: int) -> list[Tensor]:
        """Take a message, which has arrived: the rank was resumed because of it."""
        return self._store.take(message)

    def finish(self) -> None:
        """Do nothing: sends complete at once."""


class SynchronisationPoint:
    """Collective calls of a set of ranks: for each call, the tensors contributed so far."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._calls: list[dict[int, Tensor]] = []

    def contribute(self, position: int, number: int, tensor: Tensor) -> dict[int, Tensor]:
        """Add one rank's tensor to its call ``number``, and return the call's tensors."""
        if number == len(self._calls):
            self._calls.append({})
        self._calls[number][position] = tensor.clone()
        return self._calls[number]


class EmulatedCollective:
    """The `Collective` of one rank at a `SynchronisationPoint`."""

    def __init__(self, point: SynchronisationPoint, position: int) -> None:
        self._point, self._position = point, position
        self._calls = 0

    def sum(self, tensor: Tensor) -> Pending:
        return _PendingCollective(self._contribute(tensor), self._point.size, summed=tensor)

    def gather(self, tensor: Tensor) -> tuple[list[Tensor], Pending]:
        found = [torch.empty_like(tensor) for _ in range(self._point.size)]
        return found, _PendingCollective(self._contribute(tensor), self._point.size, gathered=found)

    def _contribute(self, tensor: Tensor) -> dict[int, Tensor]:
        self._calls += 1
        return self._point.contribute(self._position, self._calls - 1, tensor)


class _PendingCollective:
    def __init__(
        self,
        parts: dict[int, Tensor],
        size: int,
        *,
        summed: Tensor | None = None,
        gathered: Sequence[Tensor] = (),
    ) -> None:
        self._parts, self._size = parts, size
        self._summed, self._gathered = summed, gathered

    def wait(self) -> None:
        assert len(self._parts) == self._size, "not all ranks have called"
        parts = [self._parts[position] for position in sorted(self._parts)]
        if self._summed is not None:
            self._summed.copy_(torch.stack(parts).sum(0))
        for found, part in zip(self._gathered, parts, strict=False):
            found.copy_(part)
