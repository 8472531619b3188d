"""Dynamic loss scale for gradients in float16."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ...core.errors import InvalidInput

SMALLEST = 2.0**-24
"""The smallest positive float16. Gradients that overflow even at this scale are not finite."""


@dataclass
class LossScale:
    """A loss scale that grows until gradients overflow, shrinks, and grows again.

    Micikevicius et al. 2018, "Mixed Precision Training", section 3.2, with the defaults of
    ``torch.amp.GradScaler``. Each rank has one; all are updated alike, so they stay equal.

    Attributes:
        value: The present factor on gradients.
        growth: Factor on ``value`` after ``growth_interval`` steps without an overflow.
        backoff: Factor on ``value`` after a step with an overflow.
        growth_interval: Optimizer steps between increases; 0 for none.
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
                f"a loss scale of {self.value} with growth {self.growth} and backoff "
                f"{self.backoff} cannot work; use a positive value, a growth of at least 1, a "
                "backoff between 0 and 1 and an interval of at least 0"
            )

    def update(self, *, overflowed: bool) -> None:
        """Adapt the scale to a step.

        Raises:
            InvalidInput: Gradients overflow even at the smallest scale.
        """
        if overflowed:
            self._since_overflow = 0
            self.value *= self.backoff
            if self.value < SMALLEST:
                raise InvalidInput(
                    f"gradients are infinite or NaN even at a loss scale of {self.value:.2g}, so "
                    "the loss itself is; lower the learning rate, or find the layer that causes it"
                )
            return
        self._since_overflow += 1
        if self._since_overflow == self.growth_interval:
            self._since_overflow = 0
            # Powers of two only change the exponent; beyond 2**127 float32 itself overflows.
            self.value = min(self.value * self.growth, 2.0**127)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"value": self.value, "since_overflow": self._since_overflow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a checkpoint."""
        self.value = float(state["value"])
        self._since_overflow = int(state["since_overflow"])
