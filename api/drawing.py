"""Stored documents in other forms: schedule, timeline, and files for other programs."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from ..core.document import Record
from ..core.errors import InvalidInput
from ..core.plan import Plan
from ..core.profile import Profile
from ..core.service.plans import StoredPlan
from ..formats.chrome_trace import chrome_trace
from ..formats.profile_csv import profile_csv
from ..formats.svg import timeline_svg
from ..planner.timeline import plan_timeline
from ..schedules.of_plan import schedule_of
from .problems import Problem

PlanFormat = Literal["plan", "svg", "chrome_trace"]
MEDIA_TYPES: dict[PlanFormat, tuple[str, str]] = {
    "plan": ("application/json", "json"),
    "svg": ("image/svg+xml", "svg"),
    "chrome_trace": ("application/json", "trace.json"),
}
"""Of each form of a plan its media type and how the file's name ends."""


EXPORTED = {"Content-Security-Policy": "default-src 'none'; sandbox"}
"""Headers of files: none is a document of this server's, even if a browser shows it."""


class TraceFile(Record):
    """What viewers of Chrome's traces read.

    Attributes:
        trace_events: In the Trace Event Format.
    """

    trace_events: tuple[dict[str, Any], ...] = Field(alias="traceEvents")
    display_time_unit: str = Field("ms", alias="displayTimeUnit")


ProfileFormat = Literal["profile", "csv"]

MAX_ACTIONS = 100_000
"""Ranks' actions in one answer; a hundred bytes each."""


def plan_of(record: StoredPlan) -> Plan:
    """The plan of a record.

    Raises:
        Problem: 409: nothing fitted its request, so there is none.
    """
    if record.plan is None:
        raise Problem(
            409,
            "no-plan",
            f"nothing fits the request of {record.id}, so there is no schedule to show; its "
            "'infeasible' says why, and what would help",
        )
    return record.plan


def schedule_text(plan: Plan) -> str:
    """The plan's schedule as JSON."""
    _check_size(plan)
    return schedule_of(plan).to_json()


def timeline_text(plan: Plan) -> str:
    """The plan's simulated timeline as JSON."""
    _check_size(plan)
    return plan_timeline(plan).to_json()


def plan_text(plan: Plan, form: PlanFormat) -> str:
    """A plan in another form."""
    if form == "plan":
        return plan.to_json()
    _check_size(plan)
    timeline = plan_timeline(plan)
    return timeline_svg(plan, timeline) if form == "svg" else chrome_trace(timeline)


def profile_text(profile: Profile, form: ProfileFormat) -> str:
    """A profile in another form."""
    return profile.to_json() if form == "profile" else profile_csv(profile)


def _check_size(plan: Plan) -> None:
    """Refuse to write out a step that nobody could look at.

    Raises:
        InvalidInput: It has too many actions.
    """
    actions = 2 * plan.num_stages * plan.num_microbatches
    if actions > MAX_ACTIONS:
        raise InvalidInput(
            f"a step of this plan has {actions} actions, and at most {MAX_ACTIONS} are written "
            "out; export the plan (format=plan) and do it with the library"
        )
