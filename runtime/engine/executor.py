"""One rank's part of a `Schedule`, action after action.

The simulator plays the same document (`planner.play`): an action starts when the tensors it reads
have arrived, what it makes is sent at once and travels while the rank goes on working.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from torch import Tensor

from ...core.plan.schedule import BACKWARDS, Action, Schedule, Work
from ..partition.routes import TensorRoutes
from ..replicas.replication import Replication
from .p2p import Message, MessageTransport, list_incoming, messages_received_by, messages_sent_by
from .stage import StageRunner

Observer = Callable[[Action, float, float], None]
"""Told of each action, with its start and end in seconds of `time.perf_counter`."""

StepCoroutine = Generator[list[Message] | None, None, None]
"""What a rank does, stopping where it may have to wait for others: before an action, which reads
the messages it gives, and, with `None`, when its actions are done and what it does together with
others is under way. Goes on by itself for a rank that has a process of its own."""


class Executor:
    """Runs the stages of one rank.

    Args:
        schedule: Of all ranks.
        rank: This one.
        routes: What stages send each other.
        stages: This rank's stages by index.
        connections: To the other ranks.
        replication: What this rank shares with others.
        doing: Told in words what comes next, for errors.
        observer: Told what was done; `None` for nobody.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        routes: TensorRoutes,
        stages: Mapping[int, StageRunner],
        connections: MessageTransport,
        replication: Replication,
        doing: Callable[[str], None],
        observer: Observer | None = None,
    ) -> None:
        self._schedule, self._rank, self._routes = schedule, rank, routes
        self._stages, self._connections = stages, connections
        self._replication, self._doing = replication, doing
        self.observer = observer
        self._training = _Course(schedule, schedule.ranks, routes, rank)
        forwards = [[a for a in actions if a.work is Work.FORWARD] for actions in schedule.ranks]
        self._evaluation = _Course(schedule, forwards, routes, rank)
        self._handed: dict[Message, list[Tensor]] = {}

    def train(
        self,
        inputs: Sequence[Sequence[Tensor]],
        targets: Sequence[Tensor],
        *,
        loss_scale: float = 1.0,
        sums_gradients: bool = True,
        dropout_key: tuple[int, int] | None = None,
    ) -> list[Tensor]:
        """One training step.

        Args:
            inputs: Of each micro-batch; read where the first stage is.
            targets: Of each micro-batch; read where the last stage is.
            loss_scale: What gradients are multiplied by.
            sums_gradients: Whether gradients of shared weights are summed over their ranks.
            dropout_key: Seed and step; see `keyed_dropout`.

        Returns:
            The shares of the loss that were taken here.
        """
        for stage in self._stages.values():
            stage.loss_scale, stage.dropout_key = loss_scale, dropout_key
        _go_through(self.training(inputs, targets, sums_gradients=sums_gradients))
        return self.losses

    @property
    def losses(self) -> list[Tensor]:
        """The shares of the loss of the last step that were taken here."""
        return [loss for stage in self._stages.values() for loss in stage.losses]

    def training(
        self,
        inputs: Sequence[Sequence[Tensor]],
        targets: Sequence[Any],
        *,
        sums_gradients: bool = True,
    ) -> StepCoroutine:
        """The course of `train`."""
        for stage in self._stages.values():
            stage.begin(trains=True)
        self._doing("gathering weights")
        self._replication.begin(trains=True, sums=sums_gradients)
        yield from self._actions(self._training, inputs, targets, {})
        statistics = [s.statistics for s in self._stages.values() if s.statistics is not None]
        self._doing("sharing the statistics of batch normalisation")
        for each in statistics:
            each.share()
        yield None
        for each in statistics:
            each.finish()
        self._doing("summing gradients")
        self._replication.finish()

    def evaluate(
        self, inputs: Sequence[Sequence[Tensor]], targets: Sequence[Tensor]
    ) -> tuple[dict[int, list[Any]], list[Tensor]]:
        """Forwards alone, without gradients.

        Returns:
            The last stage's outputs by micro-batch, as far as they were made here, and the shares
            of the loss, if there are targets.
        """
        outputs: dict[int, list[Any]] = {}
        _go_through(self.evaluating(inputs, targets, outputs))
        return outputs, self.losses

    def evaluating(
        self,
        inputs: Sequence[Sequence[Tensor]],
        targets: Sequence[Any],
        outputs: dict[int, list[Any]],
    ) -> StepCoroutine:
        """The course of `evaluate`; fills in the outputs."""
        for stage in self._stages.values():
            stage.begin(trains=False)
        self._doing("gathering weights")
        self._replication.begin(trains=False, sums=False)
        yield from self._actions(self._evaluation, inputs, targets, outputs, trains=False)
        yield None
        self._replication.finish()

    def _actions(
        self,
        course: _Course,
        inputs: Sequence[Sequence[Tensor]],
        targets: Sequence[Tensor],
        outputs: dict[int, list[Any]],
        *,
        trains: bool = True,
    ) -> StepCoroutine:
        self._handed.clear()
        self._connections.begin(course.incoming)
        for position, action in enumerate(course.actions):
            wanted = messages_received_by(action, self._routes)
            yield [message for message in wanted if message not in self._handed]
            arrived = self._arrived(action, wanted)
            self._doing(_words(action))
            last = position in course.last_backwards
            self._replication.action_begins(action.stage, action.work, last=last)
            began = time.perf_counter() if self.observer else 0.0
            made = self._perform(action, arrived, inputs, targets, course, trains)
            if self.observer:
                self._stages[action.stage].settle()
                self.observer(action, began, time.perf_counter())
            self._hand_on(action, made)
            self._replication.action_ended(action.stage, action.work, last=last)
            is_last = action.stage == self._routes.num_stages - 1
            if is_last and action.work is Work.FORWARD and not trains:
                outputs[action.microbatch] = made
        self._doing("waiting for what was sent to be taken")
        self._connections.finish()

    def _perform(
        self,
        action: Action,
        arrived: Sequence[Tensor],
        inputs: Sequence[Sequence[Tensor]],
        targets: Sequence[Tensor],
        course: _Course,
        trains: bool,
    ) -> list[Any]:
        stage, microbatch = self._stages[action.stage], action.microbatch
        if action.work is Work.FORWARD:
            return stage.forward(
                microbatch,
                arrived if action.stage else inputs[microbatch],
                target=targets[microbatch] if targets else None,
                recomputed=(action.stage, microbatch) in course.recomputed,
                trains=trains,
            )
        if action.work is Work.RECOMPUTE:
            stage.recompute(microbatch)
        elif action.work is Work.BACKWARD_WEIGHT:
            stage.backward_weight(microbatch)
        else:
            is_split = action.work is Work.BACKWARD_INPUT
            return stage.backward(microbatch, arrived, split=is_split)
        return []

    def _arrived(self, action: Action, wanted: Sequence[Message]) -> list[Tensor]:
        """What other stages made for an action, once it is here."""
        found: list[Tensor] = []
        for message in wanted:
            if message in self._handed:
                found += self._handed.pop(message)
                continue
            sender = self._schedule.rank_of(message.maker, action.microbatch)
            self._doing(f"the wait for rank {sender}, before {_words(action)}")
            found += self._connections.receive(message, sender)
        return found

    def _hand_on(self, action: Action, made: Sequence[Tensor]) -> None:
        """Give every stage its part of what an action made."""
        begin = 0
        for message in messages_sent_by(action, self._routes):
            tensors = list(made[begin : begin + len(message.tensors)])
            begin += len(tensors)
            receiver = self._schedule.rank_of(message.reader, message.microbatch)
            if receiver == self._rank:
                self._handed[message] = tensors
            else:
                self._connections.send(message, receiver, tensors)


class _Course:
    """What a rank does in a step, and what it has to know of the others.

    Attributes:
        actions: Its own, first to last.
        incoming: See `messages.list_incoming`.
        last_backwards: Positions of each stage's last action that adds to gradients.
        recomputed: Stage and micro-batch of forwards that keep no graph.
    """

    def __init__(
        self, schedule: Schedule, ranks: Sequence[Sequence[Action]], routes: TensorRoutes, rank: int
    ) -> None:
        self.actions = ranks[rank]
        self.incoming = list_incoming(ranks, schedule, routes, rank)
        last = {a.stage: i for i, a in enumerate(self.actions) if a.work in BACKWARDS}
        self.last_backwards = frozenset(last.values())
        self.recomputed = frozenset(
            (a.stage, a.microbatch) for a in self.actions if a.work is Work.RECOMPUTE
        )


def _go_through(turns: StepCoroutine) -> None:
    """Take all turns, waiting where there is something to wait for."""
    for _ in turns:
        pass


def _words(action: Action) -> str:
    return _WORDS[action.work].format(action.microbatch, action.stage)


_WORDS = {
    Work.FORWARD: "the forward of micro-batch {} on stage {}",
    Work.BACKWARD: "the backward of micro-batch {} on stage {}",
    Work.BACKWARD_INPUT: "the backward to the inputs of micro-batch {} on stage {}",
    Work.BACKWARD_WEIGHT: "the backward to the weights of micro-batch {} on stage {}",
    Work.RECOMPUTE: "the recomputation of micro-batch {} on stage {}",
}
