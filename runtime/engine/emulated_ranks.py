"""All ranks of a plan emulated in one process, in the exact order of its schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...capture.observation.preserve import copy_module
from ...capture.program.segment import Segment, get_constants, list_repeated_weights
from ...core.plan.plan import Plan
from ...core.plan.schedule import Schedule
from ..batchnorm.running_statistics import BatchStatistics
from ..partition.cut import CutModel
from ..partition.rank_module import build_rank_module
from ..random_state import RandomState
from ..ranks.collective import Pending
from ..replicas.gradient_hooks import GradientHooks
from ..replicas.gradient_sync import GradientSync
from ..replicas.replication import Replication
from ..replicas.shared_weights import WeightPlacement
from .assemble import build_stage_runners
from .aux_losses import AuxLoss
from .executor import Executor, StepCoroutine
from .p2p import Acknowledged, Message, check_message
from .stage import LossOfFlat, StageRunner

RandomStates = dict[int, RandomState]
"""The random state from which each micro-batch's next forward draws."""


class EmulatedRanks:
    """The ranks of a pipeline in one process, whose executors are resumed in turn.

    Each rank has stages of its own, copied where several ranks hold the same weights, and messages
    are copied between ranks. Gradients and running statistics are combined as over process groups.
    Replicas always sum whole gradients, even where the plan shards weights.

    Random numbers follow the micro-batch: each draws on from stage to stage as in the unsplit
    model, whatever else is in flight.

    Attributes:
        modules: Each rank's parameters and buffers, under the model's names.
        current_activity: Description of what the rank resumed last did.
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
        aux_losses: Sequence[Sequence[AuxLoss]] = (),
    ) -> None:
        self.modules: list[nn.Module] = []
        self.current_activity = ""
        self._messages: dict[Message, list[Tensor]] = {}
        self._random: RandomStates = {}
        self._executors: list[Executor] = []
        placement = WeightPlacement(pieces.captured.graph.parameters, plan.balance, schedule)
        placement.check_gradients_dense(pieces.captured.program.model)
        points = {ranks: SynchronisationPoint(len(ranks)) for ranks in placement.rank_sets()}
        # One per stage, not per set of ranks: calls are matched by their number, and a stage that
        # shares nothing makes none.
        by_stage = [SynchronisationPoint(len(ranks)) for ranks in schedule.stage_ranks]
        build_runners = partial(
            build_stage_runners,
            loss=loss,
            device=device,
            policy=policy,
            aux_losses=aux_losses,
            kind=partial(_EmulatedStage, self._random),
        )
        taken: set[int] = set()
        for rank in range(len(schedule.ranks)):
            stages = _take_stages(pieces, schedule.stages_of(rank), taken)
            module = build_rank_module(list(stages.values()))
            together = _join(points, rank)
            statistics = {
                stage: EmulatedCollective(by_stage[stage], schedule.stage_ranks[stage].index(rank))
                for stage in stages
                if by_stage[stage].size > 1
            }
            runners = build_runners(pieces, stages, plan, schedule, statistics.get)
            weights = placement.shared_weights(module)
            repeated = [each for stage in stages.values() for each in list_repeated_weights(stage)]
            sync = GradientSync(weights, together, stages, repeated) if weights else None
            hooks = GradientHooks(dict(module.named_parameters()))
            replication = Replication(sync, {}, hooks)
            transport = EmulatedTransport(self._messages)
            self.modules.append(module)
            self._executors.append(
                Executor(
                    schedule,
                    rank,
                    pieces.routes,
                    runners,
                    transport,
                    replication,
                    partial(setattr, self, "current_activity"),
                )
            )

    def train(
        self,
        inputs: Sequence[Sequence[Tensor]],
        targets: Sequence[Any],
        random: Mapping[int, RandomState],
    ) -> float:
        """Run one training step and return the batch's mean loss.

        ``inputs`` are the flat inputs of each micro-batch, ``random`` the state before each.
        """
        return self._run([e.iterate_training(inputs, targets) for e in self._executors], random)

    def evaluate(
        self,
        inputs: Sequence[Sequence[Tensor]],
        targets: Sequence[Any],
        random: Mapping[int, RandomState],
    ) -> float:
        """Run the forwards alone and return the batch's mean loss; see `train`."""
        steps = [e.iterate_evaluation(inputs, targets, {}) for e in self._executors]
        return self._run(steps, random)

    def _run(self, steps: Sequence[StepCoroutine], random: Mapping[int, RandomState]) -> float:
        self._random.clear()
        self._random.update(random)
        self._run_in_turn(steps)
        # Every rank has started its collectives by now, so waiting for them cannot block.
        for step in steps:
            for _ in step:
                pass
        return float(sum(float(loss) for each in self._executors for loss in each.losses))

    def _run_in_turn(self, steps: Sequence[StepCoroutine]) -> None:
        """Let every rank go as far as it can, again and again, until all actions are done."""
        awaited = [next(step) for step in steps]
        while any(messages is not None for messages in awaited):
            moved = False
            for rank, step in enumerate(steps):
                while (needed := awaited[rank]) is not None and self._messages.keys() >= {*needed}:
                    awaited[rank] = next(step)
                    moved = True
            # `schedules.validate` has simulated this very order, so no rank can be stuck here.
            assert moved, "a schedule that was found to finish does not"


def _join(
    points: Mapping[tuple[int, ...], SynchronisationPoint], rank: int
) -> dict[tuple[int, ...], EmulatedCollective]:
    """Return a rank's collectives, one for each set of ranks that it belongs to."""
    return {
        ranks: EmulatedCollective(point, ranks.index(rank))
        for ranks, point in points.items()
        if rank in ranks
    }


def _take_stages(pieces: CutModel, indices: Sequence[int], taken: set[int]) -> dict[int, Segment]:
    """Return a rank's stages, copied if they could reach those of another rank.

    That is if an earlier rank has taken any of their tensors, or if they run code of the author's,
    which may refer to modules of other stages. Copies find only what was copied with them.
    """
    stages = {index: pieces.stages[index] for index in indices}
    tensors = {id(tensor) for stage in stages.values() for tensor in _tensors(stage)}
    if tensors & taken or any(_runs_own_code(stage) for stage in stages.values()):
        # All at once: weights tied within the rank stay tied.
        copies: Any = copy_module(nn.ModuleList(stages.values()))
        stages = dict(zip(stages, copies, strict=True))
    taken |= tensors
    return stages


def _runs_own_code(stage: Segment) -> bool:
    kinds = {type(module).__module__ for module in stage.modules()}
    return any(not kind.startswith(("torch.nn.", "stagewright.")) for kind in kinds)


def _tensors(stage: Segment) -> Iterator[Tensor]:
    yield from stage.parameters()
    yield from stage.buffers()
    yield from get_constants(stage).values()


class _EmulatedStage(StageRunner):
    """A stage whose random numbers follow the micro-batch."""

    def __init__(self, random: RandomStates, *args: Any) -> None:
        super().__init__(*args)
        self._random = random

    def forward(self, microbatch: int, *args: Any, **kwargs: Any) -> list[Any]:
        with self._draws_of(microbatch):
            return super().forward(microbatch, *args, **kwargs)

    def recompute(self, microbatch: int) -> None:
        with self._draws_of(microbatch):  # for the loss: the module repeats its first draws
            super().recompute(microbatch)

    @contextmanager
    def _draws_of(self, microbatch: int) -> Iterator[None]:
        # Processes draw from generators of their own. Here one generator serves all ranks, and
        # micro-batches in flight take turns at it.
        self._random[microbatch].restore(self._device)
        yield
        self._random[microbatch] = RandomState.now(self._device)


class EmulatedTransport:
    """The `MessageTransport` of one emulated rank, over messages that no rank received yet."""

    def __init__(self, messages: dict[Message, list[Tensor]]) -> None:
        self._messages = messages

    def begin(
        self,
        expected: Sequence[Sequence[Message]],
        reads: Sequence[Message],
        acknowledged: Acknowledged,
    ) -> None:
        """Do nothing: there are no receives to post."""

    def send(self, message: Message, receiver: int, tensors: Sequence[Tensor]) -> None:
        """Store copies, as a message between machines is one, after a real channel's checks."""
        check_message(message, tensors)
        for tensor in tensors:
            assert tensor.is_contiguous(), "a stage's boundary makes what it sends contiguous"
        self._messages[message] = [tensor.clone() for tensor in tensors]

    def receive(self, message: Message, sender: int) -> list[Tensor]:
        """Take a message, which has arrived: the rank was resumed because of it."""
        return self._messages.pop(message)

    def finish(self) -> None:
        """Do nothing: sends complete at once."""


class SynchronisationPoint:
    """Collective calls of a set of ranks: for each call, the tensors contributed so far."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls: list[dict[int, Tensor]] = []


class EmulatedCollective:
    """The `Collective` of one rank at a `SynchronisationPoint`."""

    def __init__(self, point: SynchronisationPoint, position: int) -> None:
        self._point, self._position = point, position
        self._number = 0

    def sum(self, tensor: Tensor) -> Pending:
        return self._contribute(tensor, lambda parts: tensor.copy_(torch.stack(parts).sum(0)))

    def gather(self, tensor: Tensor) -> tuple[list[Tensor], Pending]:
        found: list[Tensor] = []
        return found, self._contribute(tensor, found.extend)

    def _contribute(self, tensor: Tensor, complete: Callable[[list[Tensor]], object]) -> Pending:
        """Add this rank's tensor to its next call."""
        calls = self._point.calls
        if self._number == len(calls):
            calls.append({})
        parts = calls[self._number]
        self._number += 1
        parts[self._position] = tensor.clone()
        return _PendingCollective(parts, self._point.size, complete)


@dataclass(frozen=True)
class _PendingCollective:
    parts: dict[int, Tensor]
    size: int
    complete: Callable[[list[Tensor]], object]

    def wait(self) -> None:
        assert len(self.parts) == self.size, "not all ranks have called"
        self.complete([self.parts[position] for position in sorted(self.parts)])
