"""The answer to one planning request."""

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
    """A change with which there would be a plan.

    Attributes:
        text: The change in words.
        num_devices: Devices then; more than asked for are copies of the last one.
        options: To ask for then.
        step_time_s: Of a plan found quickly; `None` if there was no time to find one.
    """

    text: str
    num_devices: int
    options: PlanOptions
    step_time_s: float | None = None


class InfeasibleAnswer(Record):
    """Why nothing satisfies the request.

    Attributes:
        constraint: The binding constraint, e.g. ``memory``.
        required: What the best attempt needs, in the constraint's unit; `None` if not a number.
        available: What the limit allows, in the same unit; `None` if not a number.
        message: Both numbers in words, and the ways out.
        ways_out: Changes that help, the least step time for as many samples first.
    """

    constraint: str
    required: float | None = None
    available: float | None = None
    message: str
    ways_out: tuple[WayOutAnswer, ...] = ()


def to_infeasible_answer(error: Infeasible) -> InfeasibleAnswer:
    """Why there is no plan, as an answer."""
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
    """JSON has no infinity."""
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
        """The plan.

        Raises:
            Infeasible: There is none; with the binding limit, both numbers and the ways out.
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
        """Equal exactly for the same answer to the same request.

        Not the plan's own content id: two clusters may lead to the same plan, and each request
        is kept.
        """
        return f"plan_{content_digest(self)}"


class StoredPlan(PlanRecord, Stored):
    """A plan record as stored; printed, its id and the plan's table."""

    def __str__(self) -> str:
        if self.plan is not None:
            return f"{self.id}\n\n{self.plan}"
        assert self.infeasible is not None, "a record has a plan or a reason"
        return f"{self.id}: infeasible\n{self.infeasible.message}"
