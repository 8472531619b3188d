"""All ranks of a plan in one process, in the very order of its schedule."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
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
from ..ranks.collective import Work
from ..ranks.process_groups import Ranks
from ..replicas.gradient_sync import GradientSync
from ..replicas.replication import Replication
from ..replicas.shared_weights import holders, shared_weights
from .executor import Executor, StepCoroutine
from .p2p import Message, check
from .stage import LossOfFlat, StageRunner

Draws = dict[int, RandomState]
"""By micro-batch the random state in front of what is to be run next of it."""


@dataclass(frozen=True)
class _Rank:
    """One rank of a rehearsal.

    Attributes:
        module: All it holds, under the model's names.
        executor: Of its stages.
    """

    module: nn.Module
    executor: Executor


class EmulatedRanks:
    """A step as processes take it, but for the processes: their executors take turns.

    Each rank has stages of its own, copies where several ranks hold the same weights. Messages are
    copied from rank to rank. Gradients and running statistics are put together as they are over
    process groups; replicas always sum whole gradients, also where the plan shards weights.

    Random numbers follow the micro-batch: each draws on from stage to stage as the unsplit model
    does, whatever is in flight besides.

    Args:
        pieces: The cut model; its stages are used.
        plan: Where it was cut.
        schedule: The order of work.
        loss: Takes the last stage's outputs and a target.
        device: Where the stages are.
        policy: How running statistics move.
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
        self._schedule, self._mail = schedule, MessageStore()
        self._draws: Draws = {}
        self.doing = ""
        """What the last rank to take a turn did."""
        make = _Maker(pieces, plan, schedule, loss, device, policy, self._mail, self._draws)
        self._ranks = [make.rank(rank, self._says) for rank in range(len(schedule.ranks))]

    @property
    def modules(self) -> list[nn.Module]:
        """What each rank holds."""
        return [rank.module for rank in self._ranks]

    def train(
        self,
        inputs: Sequence[Sequence[Tensor]],
        targets: Sequence[Any],
        draws: Mapping[int, RandomState],
    ) -> float:
        """One training step.

        Args:
            inputs: Of each micro-batch.
            targets: Likewise.
            draws: The random state in front of each.

        Returns:
            The batch's mean loss.
        """
        return self._run([r.executor.training(inputs, targets) for r in self._ranks], draws)

    def evaluate(
        self,
        inputs: Sequence[Sequence[Tensor]],
        targets: Sequence[Any],
        draws: Mapping[int, RandomState],
    ) -> float:
        """Forwards alone; see `train`."""
        return self._run([r.executor.evaluating(inputs, targets, {}) for r in self._ranks], draws)

    def _run(self, courses: Sequence[StepCoroutine], draws: Mapping[int, RandomState]) -> float:
        self._draws.clear()
        self._draws.update(draws)
        _take_turns(courses, self._mail)
        for course in courses:  # all are here: what they do together can be waited for
            for _ in course:
                pass
        return float(sum(float(loss) for rank in self._ranks for loss in rank.executor.losses))

    def _says(self, doing: str) -> None:
        self.doing = doing


def _take_turns(courses: Sequence[StepCoroutine], mail: MessageStore) -> None:
    """Let every rank go as far as it can, again and again, until all have done their actions."""
    wanted = [next(course) for course in courses]
    while any(messages is not None for messages in wanted):
        moved = False
        for rank, course in enumerate(courses):
            while (messages := wanted[rank]) is not None and mail.has(messages):
                wanted[rank] = next(course)
                moved = True
        assert moved, "a schedule that was found to finish does not"


class _Maker:
    """Makes the ranks of a rehearsal."""

    def __init__(
        self,
        pieces: CutModel,
        plan: Plan,
        schedule: Schedule,
        loss: LossOfFlat,
        device: torch.device,
        policy: BatchStatistics,
        mail: MessageStore,
        draws: Draws,
    ) -> None:
        self._pieces, self._plan, self._schedule = pieces, plan, schedule
        self._loss, self._device, self._policy = loss, device, policy
        self._mail, self._draws = mail, draws
        self._taken: set[int] = set()
        self._stage_of = [s for s, count in enumerate(plan.balance) for _ in range(count)]
        records = pieces.captured.graph.parameters
        sets = {holders(record, self._stage_of, schedule) for record in records}
        sets.update(schedule.stage_ranks)
        self._meetings = {
            ranks: SynchronisationPoint(len(ranks)) for ranks in sets if len(ranks) > 1
        }
        self._statistics = {
            stage: SynchronisationPoint(len(ranks))
            for stage, ranks in enumerate(schedule.stage_ranks)
        }

    def rank(self, rank: int, says: Any) -> _Rank:
        stages = self._own(rank)
        module = build_rank_module(list(stages.values()))
        seats: dict[Ranks, EmulatedCollective] = {
            ranks: EmulatedCollective(meeting, ranks.index(rank))
            for ranks, meeting in self._meetings.items()
            if rank in ranks
        }
        records = self._pieces.captured.graph.parameters
        weights = shared_weights(records, self._stage_of, self._schedule, module)
        gradient_sync = GradientSync(weights, seats, stages) if weights else None
        routes, last = self._pieces.routes, self._plan.num_stages - 1
        runs = {
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
        for run in runs.values():
            run.draws = self._draws
        replication = Replication(gradient_sync, {})
        box = EmulatedTransport(self._mail)
        return _Rank(module, Executor(self._schedule, rank, routes, runs, box, replication, says))

    def _own(self, rank: int) -> dict[int, Segment]:
        """A rank's stages; copies, unless it is the first to hold what is in them."""
        stages = {index: self._pieces.stages[index] for index in self._schedule.stages_of(rank)}
        tensors = {id(tensor) for stage in stages.values() for tensor in _tensors(stage)}
        if tensors & self._taken:
            stages = copy.deepcopy(stages)
        self._taken |= tensors
        return stages

    def _running_statistics(
        self, index: int, stage: Segment, rank: int
    ) -> RunningStatistics | None:
        replicas = self._schedule.stage_ranks[index]
        place = replicas.index(rank)
        several = len(replicas) > 1
        found = RunningStatistics(
            stage,
            self._policy,
            self._schedule.num_microbatches,
            len(replicas),
            place,
            EmulatedCollective(self._statistics[index], place) if several else None,
        )
        return found if found.is_needed else None


class _EmulatedStage(StageRunner):
    """A stage whose random numbers follow the micro-batch."""

    draws: Draws

    def forward(self, microbatch: int, *args: Any, **kwargs: Any) -> list[Any]:
        self.draws[microbatch].restore(self._device)
        made = super().forward(microbatch, *args, **kwargs)
        self.draws[microbatch] = RandomState.now(self._device)
        return made


def _tensors(stage: Segment) -> Iterator[Tensor]:
    yield from stage.parameters()
    yield from stage.buffers()
    yield from get_constants(stage).values()


class MessageStore:
    """Messages between ranks that have not been read yet."""

    def __init__(self) -> None:
        self._waiting: dict[Message, list[Tensor]] = {}

    def has(self, messages: Sequence[Message]) -> bool:
        return all(message in self._waiting for message in messages)

    def put(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Take copies, as a message between machines is one."""
        self._waiting[message] = [tensor.clone() for tensor in tensors]

    def take(self, message: Message) -> list[Tensor]:
        return self._waiting.pop(message)


class EmulatedTransport:
    """One rank's `messages.MessageTransport` over a `MessageStore`."""

    def __init__(self, mail: MessageStore) -> None:
        self._mail = mail

    def begin(self, expected: Sequence[Sequence[Message]]) -> None:
        """Nothing has to be made ready."""

    def send(self, message: Message, receiver: int, tensors: Sequence[Tensor]) -> None:
        """See `messages.P2PChannels.send`."""
        check(message, tensors)
        for tensor in tensors:
            assert tensor.is_contiguous(), "a stage's boundary makes what it sends contiguous"
        self._mail.put(message, tensors)

    def receive(self, message: Message, sender: int) -> list[Tensor]:
        """Called when it is there."""
        return self._mail.take(message)

    def finish(self) -> None:
        """All was taken as it was sent."""


class SynchronisationPoint:
    """What ranks have given each other so far: of each call, every rank's tensor."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._calls: list[dict[int, Tensor]] = []

    def give(self, place: int, number: int, tensor: Tensor) -> dict[int, Tensor]:
        """One rank's part in the so manieth call."""
        if number == len(self._calls):
            self._calls.append({})
        self._calls[number][place] = tensor.clone()
        return self._calls[number]


class EmulatedCollective:
    """One rank at a `SynchronisationPoint`; it waits once all ranks have called."""

    def __init__(self, meeting: SynchronisationPoint, place: int) -> None:
        self._meeting, self._place = meeting, place
        self._calls = 0

    def sum(self, tensor: Tensor) -> Work:
        return _Pending(self._given(tensor), self._meeting.size, summed=tensor)

    def gather(self, tensor: Tensor) -> tuple[list[Tensor], Work]:
        found = [torch.empty_like(tensor) for _ in range(self._meeting.size)]
        return found, _Pending(self._given(tensor), self._meeting.size, gathered=found)

    def _given(self, tensor: Tensor) -> dict[int, Tensor]:
        self._calls += 1
        return self._meeting.give(self._place, self._calls - 1, tensor)


class _Pending:
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
        assert len(self._parts) == self._size, "not all ranks are here"
        parts = [self._parts[place] for place in sorted(self._parts)]
        if self._summed is not None:
            self._summed.copy_(torch.stack(parts).sum(0))
        for found, part in zip(self._gathered, parts, strict=False):
            found.copy_(part)
