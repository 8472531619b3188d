"""Report on a training run: predicted and measured step, split and unsplit losses."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ...core.errors import PlanMismatch
from ...core.plan.plan import Plan
from ...core.units import format_time
from .launch_ranks import TrainingResult

LOSS_TOLERANCE = 1e-5
"""Largest relative difference that another order of single-precision sums explains."""

PREDICTION_TOLERANCE = 0.25
"""Relative error of the predicted step from which the report warns about it."""

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
class RunReport:
    """Comparison of a training run with its plan and with the unsplit model."""

    model: str
    balance: tuple[int, ...]
    predicted_step_s: float
    measured_step_s: float
    measured_steps_s: tuple[float, ...]
    split_losses: tuple[float, ...]
    whole_losses: tuple[float, ...] | None
    whole_step_s: float | None

    @classmethod
    def of(cls, plan: Plan, split: TrainingResult, whole: TrainingResult | None) -> RunReport:
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
        """Relative error (predicted - measured) / measured."""
        return (self.predicted_step_s - self.measured_step_s) / self.measured_step_s

    @property
    def loss_difference(self) -> float | None:
        """Largest relative difference of a step's loss; `None` without an unsplit run."""
        if self.whole_losses is None:
            return None
        pairs = zip(self.split_losses, self.whole_losses, strict=True)
        return max(abs(split - whole) / abs(whole) for split, whole in pairs)

    def check(self) -> None:
        """Raise `PlanMismatch` if a loss differs by more than single precision explains."""
        difference = self.loss_difference
        # Not ">": a loss that is not a number compares false and must fail, too.
        if difference is not None and not difference <= LOSS_TOLERANCE:
            raise PlanMismatch(
                f"{self.model}: split and unsplit losses differ by {difference:.2g} (relative), "
                f"more than the tolerance of {LOSS_TOLERANCE:g}. A model with dropout draws other "
                "random numbers in each process: compare with dropout 0, or by 'stagewright verify'"
            )

    def remarks(self) -> list[str]:
        """Return warnings about the prediction, if it is far off."""
        if abs(self.prediction_error) <= PREDICTION_TOLERANCE:
            return []
        return [
            f"{self.model}: the predicted step is off by {self.prediction_error:+.0%}. Common "
            "causes: other load on this machine during either measurement, or layers too short to "
            "time (well under a millisecond)"
        ]

    def row(self) -> tuple[str, ...]:
        """Return the cells under `HEADINGS`; losses are those of the last step."""
        return (
            self.model,
            "+".join(map(str, self.balance)),
            format_time(self.predicted_step_s),
            format_time(self.measured_step_s),
            f"{self.prediction_error:+.1%}",
            f"{self.split_losses[-1]:.7f}",
            "" if self.whole_losses is None else f"{self.whole_losses[-1]:.7f}",
        )

    def to_dict(self) -> dict[str, object]:
        """Return the fields and what follows from them."""
        names = ("prediction_error", "loss_difference")
        return {**asdict(self), **{name: getattr(self, name) for name in names}}
