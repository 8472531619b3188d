"""What was predicted, what was measured, and whether the split model computes the whole one."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from ...core.errors import PlanMismatch
from ...core.plan.plan import Plan
from ...core.units import format_time
from .launch_ranks import TrainingResult

LOSS_TOLERANCE = 1e-5
"""Relative; single precision sums in another order."""

PREDICTION_TOLERANCE = 0.25
"""Beyond this the prediction is remarked upon; it says nothing about correctness."""

HEADINGS = (
    "model",
    "stages",
    "predicted step",
    "measured step",
    "error",
    "loss split",
    "loss whole",
)


@dataclass(frozen=True)
class Comparison:
    """One training run against its plan and against the unsplit model."""

    model: str
    balance: tuple[int, ...]
    predicted_step_s: float
    measured_step_s: float
    measured_steps_s: tuple[float, ...]
    split_losses: tuple[float, ...]
    whole_losses: tuple[float, ...] | None
    whole_step_s: float | None

    @classmethod
    def of(cls, plan: Plan, split: TrainingResult, whole: TrainingResult | None) -> Comparison:
        return cls(
            model=plan.model,
            balance=plan.balance,
            predicted_step_s=plan.step_time_s,
            measured_step_s=split.step_time_s,
            measured_steps_s=split.step_times_s,
            split_losses=split.losses,
            whole_losses=whole.losses if whole else None,
            whole_step_s=whole.step_time_s if whole else None,
        )

    @property
    def prediction_error(self) -> float:
        """(predicted - measured) / measured."""
        return (self.predicted_step_s - self.measured_step_s) / self.measured_step_s

    @property
    def loss_difference(self) -> float | None:
        """Largest relative difference of a step's loss, `None` without an unsplit run."""
        if self.whole_losses is None:
            return None
        pairs = zip(self.split_losses, self.whole_losses, strict=True)
        return max(abs(split - whole) / abs(whole) for split, whole in pairs)

    def check(self) -> None:
        """Insist that the split model computes the whole one.

        Raises:
            PlanMismatch: A loss differs by more than single precision explains.
        """
        difference = self.loss_difference
        if difference is not None and not difference <= LOSS_TOLERANCE:
            raise PlanMismatch(
                f"{self.model}: the split model's loss differs by {difference:.2g} (relative) from "
                f"the unsplit one's, more than {LOSS_TOLERANCE:g}"
            )

    def remarks(self) -> list[str]:
        """What a reader should be told about the prediction, if anything."""
        if abs(self.prediction_error) <= PREDICTION_TOLERANCE:
            return []
        return [
            f"{self.model}: the predicted step is {self.prediction_error:+.0%} off. Other work on "
            "this machine during either measurement, or layers too small to time (well under a "
            "millisecond), are the usual reasons"
        ]

    def row(self) -> tuple[str, ...]:
        """Cells under `HEADINGS`; losses are those of the last step."""
        return (
            self.model,
            "+".join(map(str, self.balance)),
            format_time(self.predicted_step_s),
            format_time(self.measured_step_s),
            f"{self.prediction_error:+.1%}",
            f"{self.split_losses[-1]:.7f}",
            "" if self.whole_losses is None else f"{self.whole_losses[-1]:.7f}",
        )

    def rows(self) -> list[tuple[str, ...]]:
        """Headings and the one row."""
        return [HEADINGS, self.row()]

    def to_dict(self) -> dict[str, object]:
        derived = {
            "prediction_error": self.prediction_error,
            "loss_difference": self.loss_difference,
        }
        return {**asdict(self), **derived}

    def to_json(self) -> str:
        return json.dumps(self.to_dict())
