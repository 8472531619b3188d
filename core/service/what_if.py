"""Answers to what-if questions: the cost of a given split, and comparisons of plans."""

from __future__ import annotations

from typing import Literal

from ..document import Record
from ..plan.plan import Plan
from ..plan.timeline import Timeline
from .plans import InfeasibleAnswer


class Simulation(Record):
    """The answer to a `SimulationRequest`.

    Attributes:
        plan: The split with its costs.
        infeasible: The reason if the split cannot be used.
        timeline: Timeline of a step, if requested.
    """

    status: Literal["simulated", "infeasible"]
    plan: Plan | None = None
    infeasible: InfeasibleAnswer | None = None
    timeline: Timeline | None = None


class ComparedPlan(Record):
    """One plan of a comparison; fields that an infeasible one lacks are `None`.

    Attributes:
        samples_per_s: Throughput, if the profile knows the micro-batch size.
        times_slowest: Step time divided by the longest one compared.
        peak_memory_bytes: Peak memory of the device that needs most.
        gap: Relative gap between the plan's objective and its lower bound.
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
        fastest: Id of the plan with the highest throughput, or the shortest step if a micro-batch
            size is unknown; `None` if there is no plan.
        same_profile: Whether all plans were made from one profile.
    """

    plans: tuple[ComparedPlan, ...]
    fastest: str | None
    same_profile: bool
