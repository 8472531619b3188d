"""Lines of a list of plans, with what their profiles say of the model."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Row, Select, and_, or_, select

from ...core.service.documents import PlanSummary
from .tables import PLANS, PROFILES

OF_PROFILE = frozenset({"model", "family", "num_layers", "num_parameters"})
COLUMNS = {
    name: (PROFILES if name in OF_PROFILE else PLANS).c[name] for name in PlanSummary.model_fields
}
SEARCHED = ("id", "model", "family", "devices", "schedule", "status")

MAX_WORDS = 8
"""Searched for; each is looked for in every column."""


def plan_summaries(project_id: str, search: str) -> Select[Any]:
    """A project's plans, in no order; those alone that have every word of a search."""
    profile_of_plan = and_(
        PLANS.c.project_id == PROFILES.c.project_id, PLANS.c.profile_id == PROFILES.c.id
    )
    rows = (
        select(PLANS.c.position, *COLUMNS.values())
        .join_from(PLANS, PROFILES, profile_of_plan)
        .where(PLANS.c.project_id == project_id)
    )
    for word in search.replace("\0", " ").split()[:MAX_WORDS]:
        found = (COLUMNS[name].icontains(word, autoescape=True) for name in SEARCHED)
        rows = rows.where(or_(*found))
    return rows


def as_summary(row: Row[Any]) -> PlanSummary:
    """A row of `plan_summaries`."""
    values = row[1:]  # the first is its position
    return PlanSummary.model_validate(dict(zip(COLUMNS, values, strict=True)))
