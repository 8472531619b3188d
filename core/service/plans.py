"""Answers to planning requests."""

from __future__ import annotations

from math import isfinite
from typing import Literal, Self

from pydantic import model_validator

from ..cluster.cluster import Cluster
from ..document import Record, content_digest
from ..errors import Infeasible
from ..plan.plan import Plan, PlanOptions
from .stored import Stored

Status = Literal["planned", "infeasible"]


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


class StoredPlan(PlanRecord, Stored):
    """A stored plan record, which prints as its id and the plan's table."""

    def __str__(self) -> str:
        if self.plan is not None:
            return f"{self.id}\n\n{self.plan}"
        assert self.infeasible is not None, "a record has a plan or a reason"
        return f"{self.id}: infeasible\n{self.infeasible.message}"
