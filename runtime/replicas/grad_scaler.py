"""The factor that keeps gradients in float16 from vanishing, and from overflowing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ...core.errors import InvalidInput

SMALLEST = 2.0**-24
"""The least float16 above zero: below it no factor brings gradients into range."""


@dataclass
class LossScale:
    """As large as gradients allow: it grows until some overflow, shrinks, and grows again.

    Micikevicius et al. 2018, "Mixed Precision Training", section 3.2, with the numbers of
    ``torch.amp.GradScaler``. One object a rank; all ranks tell theirs the same, so they stay equal.

    Attributes:
        value: What gradients are multiplied by now.
        growth: It is multiplied by this after ``growth_interval`` steps without an overflow.
        backoff: And by this after a step with one.
        growth_interval: In optimizer steps; 0 to leave it as it is until it overflows.
    """

    value: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    growth_interval: int = 2000
    _since_overflow: int = 0

    def __post_init__(self) -> None:
        sound = self.value > 0 and math.isfinite(self.value) and self.growth >= 1
        if not (sound and 0 < self.backoff < 1 and self.growth_interval >= 0):
            raise InvalidInput(
                f"a loss scale of {self.value} that grows by {self.growth} and backs off by "
                f"{self.backoff} cannot work; give a positive value, growth from 1 up, backoff "
                "between 0 and 1 and an interval from 0 up"
            )

    def update(self, *, overflowed: bool) -> None:
        """Follow a step.

        Raises:
            InvalidInput: It cannot shrink any more: what is infinite is not for want of range.
        """
        if overflowed:
            self._since_overflow = 0
            self.value *= self.backoff
            if self.value < SMALLEST:
                raise InvalidInput(
                    f"gradients are infinite or NaN even at a loss scale of {self.value:.2g}: the "
                    "loss itself is; lower the learning rate, or look for the layer that makes it"
                )
            return
        self._since_overflow += 1
        if self._since_overflow == self.growth_interval:
            self._since_overflow = 0
            self.value = min(self.value * self.growth, 2.0**127)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"value": self.value, "since_overflow": self._since_overflow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.value = float(state["value"])
        self._since_overflow = int(state["since_overflow"])
