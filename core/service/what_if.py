"""Answers to what-if questions: what a split would cost, and plans side by side."""

from __future__ import annotations

from typing import Literal

from ..document import Record
from ..plan.plan import Plan
from ..plan.timeline import Timeline
from .plans import InfeasibleAnswer


class Simulation(Record):
    """The answer to a `SimulationRequest`.

    Attributes:
        status: Whether the split can be used as it stands.
        plan: The split with its costs.
        infeasible: Why it cannot be used.
        timeline: One step, if asked for.
    """

    status: Literal["simulated", "infeasible"]
    plan: Plan | None = None
    infeasible: InfeasibleAnswer | None = None
    timeline: Timeline | None = None


class ComparedPlan(Record):
    """One plan of a comparison; what an infeasible one has not is `None`.

    Attributes:
        samples_per_s: Micro-batches' samples a second, where the profile knows their size.
        times_slowest: Step time as a share of the longest one compared.
        peak_memory_bytes: Of the device that needs most.
        gap: How far, relatively, the plan may be from the best there is.
    """

    id: str
    status: Literal["planned", "infeasible"]
    model: str | None = None
    profile_id: str
    num_devices: int
    schedule: str
    num_microbatches: int | None = None
    balance: tuple[int, ...] | None = None
    replicas: tuple[int, ...] | None = None
    step_time_s: float | None = None
    times_slowest: float | None = None
    samples_per_s: float | None = None
    bubble_fraction: float | None = None
    peak_memory_bytes: int | None = None
    gap: float | None = None
    estimated: bool | None = None
    message: str | None = None


class Comparison(Record):
    """Plans side by side, in the order asked for.

    Attributes:
        fastest: Id of the plan with the most samples a second, or, where a size is not known, the
            shortest step; `None` if there is no plan.
        same_profile: Whether all are of one profile: else they differ in more than the plan.
    """

    plans: tuple[ComparedPlan, ...]
    fastest: str | None
    same_profile: bool
