"""Stored documents and lists of them, and answers to planning and what-if questions."""

from __future__ import annotations

from datetime import datetime
from math import isfinite
from typing import Annotated, Literal, Self
from unicodedata import category

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from ..cluster.cluster import Cluster
from ..document import Record, content_digest
from ..errors import Infeasible
from ..graph.graph import Graph
from ..plan.plan import Plan, PlanOptions
from ..plan.timeline import Timeline
from ..profile.profile import Profile

Status = Literal["planned", "infeasible"]
MAX_TAGS = 20
Tag = Annotated[str, Field(pattern=r"^[^\s\x00-\x1f\x7f]+$", max_length=50)]
"""A word; what ends it differs between languages, so no control character is allowed in it."""


def _refuse_control_characters(text: str) -> str:
    for position, character in enumerate(text):
        if category(character) == "Cc":
            raise PydanticCustomError(
                "control_character",
                "contains the control character U+{code} at position {position}; remove it",
                {"code": f"{ord(character):04X}", "position": position},
            )
    return text


Title = Annotated[
    str, Field(min_length=1, max_length=200), AfterValidator(_refuse_control_characters)
]
"""A name that people choose: of a plan, a project, a key. Databases cannot store a NUL."""


class Stored(Record):
    """A stored document: its id, and the time at which it was first stored (UTC)."""

    id: str
    created_at: datetime


class PlanLabels(Record):
    """Labels that people give a plan, the one part of it that changes.

    Attributes:
        name: For people; several plans may have one name.
        tags: Words without blanks and control characters, to find plans by.
        notes: Any text.
    """

    name: Title | None = None
    tags: tuple[Tag, ...] = Field((), max_length=MAX_TAGS)
    notes: str | None = Field(None, max_length=4000)


class StoredProfile(Stored):
    """A stored profile."""

    profile: Profile


class StoredGraph(Stored):
    """A stored graph."""

    graph: Graph


class ProfileSummary(Stored):
    """An entry in a list of profiles.

    Attributes:
        model: Class name of the model.
        estimated: Whether the profile was estimated rather than measured.
        family: Model family, if the model was built from one.
        num_parameters: Tied weights count once; `None` if the profile does not list them.
    """

    model: str
    num_layers: int
    estimated: bool
    family: str | None = None
    num_parameters: int | None = None


class GraphSummary(Stored):
    """An entry in a list of graphs."""

    model: str
    num_layers: int


class PlanSummary(PlanLabels, Stored):
    """An entry in a list of plans.

    Attributes:
        profile_id: The profile planned from; `model`, `family`, `num_layers` and
            `num_parameters` describe it, as in a `ProfileSummary`.
        devices: Requested devices of each kind, e.g. ``8 x H100``.
        schedule: The plan's schedule, or the requested one if infeasible.
        num_stages: `None` if infeasible.
        step_time_s: `None` if infeasible.
    """

    status: Status
    profile_id: str
    model: str | None = None
    family: str | None = None
    num_layers: int | None = None
    num_parameters: int | None = None
    devices: str | None = None
    schedule: str | None = None
    num_stages: int | None = None
    step_time_s: float | None = None


class PlanList(Record):
    """Plans, newest first; ``next_cursor`` requests the next page, `None` on the last one."""

    plans: tuple[PlanSummary, ...]
    next_cursor: str | None = None


class ProfileList(Record):
    """Profiles, newest first; ``next_cursor`` as in `PlanList`."""

    profiles: tuple[ProfileSummary, ...]
    next_cursor: str | None = None


class GraphList(Record):
    """Graphs, newest first; ``next_cursor`` as in `PlanList`."""

    graphs: tuple[GraphSummary, ...]
    next_cursor: str | None = None


class WayOutAnswer(Record):
    """A change that would make the request feasible.

    Attributes:
        text: The change in words.
        num_devices: Number of devices; those beyond the requested ones are copies of the last.
        options: The changed options.
        step_time_s: Step time of a plan found quickly; `None` if there was no time to find one.
    """

    text: str
    num_devices: int
    options: PlanOptions
    step_time_s: float | None = None


class InfeasibleAnswer(Record):
    """The reason why a request is infeasible.

    Attributes:
        constraint: The binding constraint, e.g. ``memory``.
        required: Requirement of the best attempt, in the constraint's unit; `None` if infinite.
        available: The limit, in the same unit; `None` if infinite.
        message: Both numbers in words, and the remedies.
        ways_out: Changes that help, the least step time for as many samples first.
    """

    constraint: str
    required: float | None = None
    available: float | None = None
    message: str
    ways_out: tuple[WayOutAnswer, ...] = ()


def to_infeasible_answer(error: Infeasible) -> InfeasibleAnswer:
    """Convert an `Infeasible` error to the service's answer."""
    return InfeasibleAnswer(
        constraint=error.constraint,
        required=_number(error.required),
        available=_number(error.available),
        message=str(error),
        ways_out=tuple(
            WayOutAnswer(
                text=remedy.text,
                num_devices=len(remedy.cluster.devices),
                options=remedy.options,
                step_time_s=remedy.step_time_s,
            )
            for remedy in error.remedies
        ),
    )


def _number(value: float | None) -> float | None:
    # JSON has no infinity.
    return value if value is not None and isfinite(value) else None


class PlanRecord(Record):
    """A planning request and its answer: a plan, or the reason why there is none."""

    status: Status
    profile_id: str
    cluster: Cluster
    options: PlanOptions
    plan: Plan | None = None
    infeasible: InfeasibleAnswer | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.plan is None) == (self.status == "planned") or (self.infeasible is None) == (
            self.status == "infeasible"
        ):
            raise ValueError(f"status {self.status!r} disagrees with the answer")
        return self

    def require(self) -> Plan:
        """Return the plan.

        Raises:
            Infeasible: There is none; the error has the binding constraint and both numbers.
        """
        if self.plan is not None:
            return self.plan
        assert self.infeasible is not None, "a record has a plan or a reason"
        raise Infeasible(
            self.infeasible.message,
            constraint=self.infeasible.constraint,
            required=self.infeasible.required,
            available=self.infeasible.available,
        )

    def record_id(self) -> str:
        """Return an id that is equal exactly for the same answer to the same request."""
        # Not the plan's own content id: requests for two clusters may lead to the same plan.
        return f"plan_{content_digest(self)}"


class StoredPlan(PlanRecord, PlanLabels, Stored):
    """A stored plan record, which prints as its id and the plan's table."""

    def __str__(self) -> str:
        if self.plan is not None:
            return f"{self.id}\n\n{self.plan}"
        assert self.infeasible is not None, "a record has a plan or a reason"
        return f"{self.id}: infeasible\n{self.infeasible.message}"


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
        times_slowest: Time per sample divided by the longest one compared; step time where a
            throughput is unknown.
        peak_memory_bytes: Peak memory of the device that needs most.
        gap: Relative gap between the plan's objective and its lower bound.
    """

    id: str
    status: Status
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

    @property
    def is_by_sample(self) -> bool:
        """Return True if times are compared per sample, as plans may differ in batch size."""
        return all(one.samples_per_s for one in self.plans if one.step_time_s is not None)
