"""Interface of replica strategies, informed about the course of a step."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ...core.plan.schedule import Work
from .gradient_hooks import GradientHooks
from .gradient_sync import GradientSync


class StageStrategy:
    """Base class of replica strategies: the cooperation of one stage's replicas; does nothing.

    A step calls `begin`, then `action_begins` and `action_ended` around every action of the stage,
    then `finish`. A strategy may synchronise its replicas in any of these calls; if it does so
    around actions, `strategy` checks beforehand that the schedule allows it.
    """

    def begin(self, *, trains: bool, sums: bool) -> None:
        """Begin a step, with backwards if ``trains``, at whose end ``sums`` adds up replicas."""

    def action_begins(self, work: Work, *, last: bool) -> None:
        """Prepare for an action whose inputs have arrived; ``last`` marks the last backward."""

    def action_ended(self, work: Work, *, last: bool) -> None:
        """Follow up on an action whose outputs have been sent."""

    def finish(self) -> None:
        """Finish a step, after all actions of the rank."""

    def sums(self, weight: Tensor) -> bool:
        """Return True if this strategy sums the gradient of an unsharded weight."""
        return False


class Replication:
    """Ways in which a rank's gradients become the whole batch's: sums, strategies and hooks."""

    def __init__(
        self,
        gradient_sync: GradientSync | None,
        stages: Mapping[int, StageStrategy],
        hooks: GradientHooks,
    ) -> None:
        self._gradient_sync, self._stages, self._hooks = gradient_sync, dict(stages), hooks
        self._sums = self._trains = False

    def begin(self, *, trains: bool, sums: bool) -> None:
        """Begin a step; see `StageStrategy.begin`."""
        self._sums, self._trains = trains and sums, trains
        if trains:
            self._hooks.begin(sums=sums)
        if self._gradient_sync is not None and trains:
            self._gradient_sync.begin(sums=sums)
        # Sorted: a rank of several stages must enter their collectives in the order of the others.
        for stage in sorted(self._stages):
            self._stages[stage].begin(trains=trains, sums=self._sums)

    def action_begins(self, stage: int, work: Work, *, last: bool) -> None:
        """See `StageStrategy.action_begins`."""
        if last and self._sums and self._gradient_sync is not None:
            self._gradient_sync.last_backward_begins(stage)
        if stage in self._stages:
            self._stages[stage].action_begins(work, last=last)

    def action_ended(self, stage: int, work: Work, *, last: bool) -> None:
        """See `StageStrategy.action_ended`."""
        if last and self._sums and self._gradient_sync is not None:
            self._gradient_sync.last_backward_ended(stage)
        if stage in self._stages:
            self._stages[stage].action_ended(work, last=last)

    def finish(self) -> None:
        """See `StageStrategy.finish`."""
        if self._sums and self._gradient_sync is not None:
            self._gradient_sync.finish()
        for stage in sorted(self._stages):
            self._stages[stage].finish()
        if self._trains:
            self._hooks.finish()
