"""Answers with what only the client knows of them."""

from __future__ import annotations

from typing import Literal

from ...core.service.plans import StoredPlan


class PlanAnswer(StoredPlan):
    """A plan as stored, or why there is none.

    Attributes:
        reused: What the service had found out before: this very plan, or the model's costs.
    """

    reused: Literal["plan", "profile"] | None = None
