"""Answers with what only the client knows of them."""

from __future__ import annotations

from typing import Literal

from ..core.errors import Infeasible
from ..core.plan import Plan
from ..core.service.plans import StoredPlan


class PlanAnswer(StoredPlan):
    """A plan as stored, or why there is none.

    Attributes:
        reused: What the service had found out before: this very plan, or the model's costs.
    """

    reused: Literal["plan", "profile"] | None = None

    def require(self) -> Plan:
        """The plan.

        Raises:
            Infeasible: Nothing fits; with the binding limit, both numbers and the ways out.
        """
        if self.plan is not None:
            return self.plan
        reason = self.infeasible
        assert reason is not None, "an answer has a plan or a reason"
        raise Infeasible(
            reason.message,
            constraint=reason.constraint,
            required=reason.required,
            available=reason.available,
        )
