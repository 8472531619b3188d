"""What a rank does with others that hold its weights, told of the course of a step."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ...core.plan.schedule import Work
from .gradient_sync import GradientSync


class StageStrategy:
    """What the replicas of one stage do together. This one does nothing.

    A step calls `begin`, then `action_begins` and `action_ended` around every action of the stage,
    then `finish`. All replicas must make the same calls in the same order; between two of them
    they may wait for each other.
    """

    def begin(self, *, trains: bool, sums: bool) -> None:
        """A step begins.

        Args:
            trains: Whether there are backwards.
            sums: Whether gradients are to be summed over replicas when it ends.
        """

    def action_begins(self, work: Work, *, last: bool) -> None:
        """What an action reads has arrived; ``last`` if no backward comes after this one."""

    def action_ended(self, work: Work, *, last: bool) -> None:
        """An action is done, and what it made is on its way."""

    def finish(self) -> None:
        """The rank has done all its actions of the step."""

    def sums(self, weight: Tensor) -> bool:
        """Whether it sums this weight's gradient, which is whole on every replica."""
        return False


class Replication:
    """All that a rank's stages share with other ranks.

    Args:
        gradient_sum: Of weights that no strategy takes care of; `None` if there are none.
        stages: What replicas of this rank's stages do, by stage, where that is not all.
    """

    def __init__(
        self, gradient_sync: GradientSync | None, stages: Mapping[int, StageStrategy]
    ) -> None:
        self._gradient_sync, self._stages = gradient_sync, dict(stages)
        self._sums = False

    def begin(self, *, trains: bool, sums: bool) -> None:
        """A step begins; see `StageStrategy.begin`."""
        self._sums = trains and sums
        if self._gradient_sync is not None and trains:
            self._gradient_sync.begin(sums=sums)
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
