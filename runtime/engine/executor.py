"""Executor of one rank's part of a `Schedule`, action by action.

It reads the document that the simulator plays: an action starts when the tensors it reads have
arrived, and its outputs are sent at once and travel while the rank goes on working.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from torch import Tensor

from ...capture.observation.autocast_cache import keep_conversions
from ...core.plan.schedule import BACKWARDS, Action, Schedule, Work
from ..partition.routes import TensorRoutes
from ..replicas.replication import Replication
from .action_timer import ActionTimer
from .finite_check import FiniteCheck
from .p2p import (
    Message,
    MessageTransport,
    list_acknowledged,
    list_incoming,
    list_reads,
    messages_received_by,
    messages_sent_by,
)
from .stage import StageRunner

StepCoroutine = Generator[list[Message] | None, None, None]
"""A rank's course through a step, suspended wherever it may have to wait for other ranks: before an
action it yields the messages that the action reads, and once its actions are done and collective
operations are under way it yields `None`. A rank in a process of its own simply resumes it; ranks
emulated in one process are resumed in turn, as soon as what they wait for is there."""


class Executor:
    """Executor of the stages of one rank.

    ``rank`` is that of the schedule, ``stages`` are its stages by index. ``set_activity`` is called
    with a description of what comes next, for error messages; ``sender_of`` returns the number in
    the process group of the rank that sends for one of the schedule.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        routes: TensorRoutes,
        stages: Mapping[int, StageRunner],
        transport: MessageTransport,
        replication: Replication,
        set_activity: Callable[[str], None],
        sender_of: Callable[[int], int] = lambda rank: rank,
    ) -> None:
        self._sender_of = sender_of
        self._schedule, self._rank, self._routes = schedule, rank, routes
        self._stages, self._transport = stages, transport
        self._replication, self._set_activity = replication, set_activity
        self.timer: ActionTimer | None = None
        self.finite_check: FiniteCheck | None = None
        self._training = _RankProgram(schedule, schedule.ranks, routes, rank)
        forwards = [[a for a in actions if a.work is Work.FORWARD] for actions in schedule.ranks]
        self._evaluation = _RankProgram(schedule, forwards, routes, rank)
        self._local: dict[Message, list[Tensor]] = {}

    def train(
        self,
        inputs: Sequence[Sequence[Tensor]],
        targets: Sequence[Tensor],
        *,
        loss_scale: float = 1.0,
        sums_gradients: bool = True,
        dropout_key: tuple[int, int] | None = None,
    ) -> list[Tensor]:
        """Run one training step; return the shares of the batch's mean loss computed on this rank.

        ``inputs`` are the flat inputs of each micro-batch, read on ranks of the first stage;
        ``targets`` are read on those of the last. ``sums_gradients`` sums those of shared weights
        over their ranks; ``dropout_key`` is the seed and step of `keyed_dropout`.
        """
        for stage in self._stages.values():
            stage.loss_scale, stage.dropout_key = loss_scale, dropout_key
        _run_to_end(self.iterate_training(inputs, targets, sums_gradients=sums_gradients))
        return self.losses

    @property
    def losses(self) -> list[Tensor]:
        """Return the shares of the last step's loss that were computed on this rank."""
        return [loss for stage in self._stages.values() for loss in stage.losses]

    def iterate_training(
        self,
        inputs: Sequence[Sequence[Tensor]],
        targets: Sequence[Any],
        *,
        sums_gradients: bool = True,
    ) -> StepCoroutine:
        """Run a training step as a coroutine; see `train`."""
        for stage in self._stages.values():
            stage.begin(trains=True)
        self._set_activity("gathering weights")
        self._replication.begin(trains=True, sums=sums_gradients)
        with keep_conversions():
            yield from self._perform_actions(self._training, inputs, targets, {})
        statistics = [s.statistics for s in self._stages.values() if s.statistics is not None]
        self._set_activity("sharing the statistics of batch normalisation")
        # All collectives are started before the first is waited for: a rank of several stages is
        # in several groups, and emulated ranks cannot finish one until the last of them got here.
        for each in statistics:
            each.share()
        yield None
        for each in statistics:
            if (flags := each.finish()) is not None:
                self._check_flags(*flags)
        self._set_activity("summing gradients")
        self._replication.finish()

    def evaluate(
        self, inputs: Sequence[Sequence[Tensor]], targets: Sequence[Tensor]
    ) -> tuple[dict[int, list[Any]], list[Tensor]]:
        """Run the forwards of a batch without gradients.

        Returns:
            The last stage's outputs computed on this rank, by micro-batch, and the shares of the
            loss, if targets were given.
        """
        outputs: dict[int, list[Any]] = {}
        _run_to_end(self.iterate_evaluation(inputs, targets, outputs))
        return outputs, self.losses

    def iterate_evaluation(
        self,
        inputs: Sequence[Sequence[Tensor]],
        targets: Sequence[Any],
        outputs: dict[int, list[Any]],
    ) -> StepCoroutine:
        """Run an evaluation as a coroutine that fills in ``outputs``; see `evaluate`."""
        for stage in self._stages.values():
            stage.begin(trains=False)
        self._set_activity("gathering weights")
        self._replication.begin(trains=False, sums=False)
        yield from self._perform_actions(self._evaluation, inputs, targets, outputs, trains=False)
        yield None
        self._replication.finish()

    def _perform_actions(
        self,
        program: _RankProgram,
        inputs: Sequence[Sequence[Tensor]],
        targets: Sequence[Tensor],
        outputs: dict[int, list[Any]],
        *,
        trains: bool = True,
    ) -> StepCoroutine:
        self._local.clear()
        if self.timer:
            self.timer.begin()
        self._transport.begin(program.incoming, program.reads, program.acknowledged)
        for position, action in enumerate(program.actions):
            needed = messages_received_by(action, self._routes)
            yield [message for message in needed if message not in self._local]
            arrived = self._receive(action, needed)
            self._set_activity(_describe(action))
            is_last = position in program.last_backwards
            # Replicas may synchronise here. That comes after the receive, as `deadlock_check`
            # assumes; and weights gathered before it would take memory while this rank waits.
            self._replication.action_begins(action.stage, action.work, last=is_last)
            began = self.timer.now() if self.timer else 0.0
            losses = self._stages[action.stage].losses
            before = len(losses)
            made = self._perform(action, arrived, inputs, targets, program, trains)
            if self.timer:
                self.timer.add(action, began)
            if self.finite_check is not None and trains:
                self._look(self.finite_check, action, arrived, losses[before:], made)
            # Outputs leave before replicas synchronise again: their receivers need not wait for it.
            self._send(action, made)
            self._replication.action_ended(action.stage, action.work, last=is_last)
            is_output = action.stage == self._routes.num_stages - 1
            if is_output and action.work is Work.FORWARD and not trains:
                outputs[action.microbatch] = made
        self._set_activity("waiting for what was sent to be taken")
        self._transport.finish()
        if self.timer:
            self.timer.report()

    def _perform(
        self,
        action: Action,
        arrived: Sequence[Tensor],
        inputs: Sequence[Sequence[Tensor]],
        targets: Sequence[Tensor],
        program: _RankProgram,
        trains: bool,
    ) -> list[Any]:
        stage, microbatch = self._stages[action.stage], action.microbatch
        if action.work is Work.FORWARD:
            return stage.forward(
                microbatch,
                arrived if action.stage else inputs[microbatch],
                target=targets[microbatch] if targets else None,
                recomputed=(action.stage, microbatch) in program.recomputed,
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

    def _check_flags(self, flags: Tensor, check: Callable[[Sequence[bool]], None]) -> None:
        """Check flags when the host reads values at the end of the step, or now if it does not."""
        if self.finite_check is not None:
            self.finite_check.read_along(flags, check)
        else:
            check(flags.tolist())

    def _look(
        self,
        check: FiniteCheck,
        action: Action,
        arrived: Sequence[Tensor],
        losses: Sequence[Tensor],
        made: Sequence[Any],
    ) -> None:
        if action.work is Work.FORWARD and action.stage == self._routes.num_stages - 1:
            made = ()  # the model's own outputs may hold infinities, as masked logits do
        check.look(action, arrived, losses, made)

    def _receive(self, action: Action, needed: Sequence[Message]) -> list[Tensor]:
        found: list[Tensor] = []
        for message in needed:
            if message in self._local:
                found += self._local.pop(message)
                continue
            sender = self._schedule.rank_of(message.sending_stage, action.microbatch)
            # `core.rank_heartbeats` reads "the wait for": a rank that waits is not to blame.
            waiting = f"the wait for rank {self._sender_of(sender)}"
            self._set_activity(f"{waiting}, before {_describe(action)}")
            found += self._transport.receive(message, sender)
        return found

    def _send(self, action: Action, made: Sequence[Tensor]) -> None:
        begin = 0
        for message in messages_sent_by(action, self._routes):
            tensors = list(made[begin : begin + len(message.tensors)])
            begin += len(tensors)
            receiver = self._schedule.rank_of(message.receiving_stage, message.microbatch)
            if receiver == self._rank:  # the next stage is here too, as in zbv's turning point
                self._local[message] = tensors
            else:
                self._transport.send(message, receiver, tensors)


class _RankProgram:
    """A rank's actions in a step, with what it must know of the other ranks.

    Attributes:
        actions: This rank's actions in order.
        incoming: Messages of each rank to this one; see `list_incoming`.
        reads: Those messages in the order in which they are read; see `list_reads`.
        acknowledged: What they say of the messages of this rank; see `list_acknowledged`.
        last_backwards: Positions of each stage's last action that adds to gradients.
        recomputed: Stage and micro-batch of the forwards that keep no graph.
    """

    def __init__(
        self,
        schedule: Schedule,
        ranks: Sequence[Sequence[Action]],
        routes: TensorRoutes,
        rank: int,
    ) -> None:
        self.actions = ranks[rank]
        self.incoming = list_incoming(ranks, schedule, routes, rank)
        self.reads = list_reads(self.actions, self.incoming, routes)
        self.acknowledged = list_acknowledged(ranks, schedule, routes, rank)
        last = {a.stage: i for i, a in enumerate(self.actions) if a.work in BACKWARDS}
        self.last_backwards = frozenset(last.values())
        self.recomputed = frozenset(
            (a.stage, a.microbatch) for a in self.actions if a.work is Work.RECOMPUTE
        )


def _run_to_end(step: StepCoroutine) -> None:
    for _ in step:
        pass


def _describe(action: Action) -> str:
    return _DESCRIPTIONS[action.work].format(action.microbatch, action.stage)


_DESCRIPTIONS = {
    Work.FORWARD: "the forward of micro-batch {} on stage {}",
    Work.BACKWARD: "the backward of micro-batch {} on stage {}",
    Work.BACKWARD_INPUT: "the backward to the inputs of micro-batch {} on stage {}",
    Work.BACKWARD_WEIGHT: "the backward to the weights of micro-batch {} on stage {}",
    Work.RECOMPUTE: "the recomputation of micro-batch {} on stage {}",
}
