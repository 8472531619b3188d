"""Stored documents in other forms: schedule, timeline, and files for other programs."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from ...core.document import Record
from ...core.errors import InvalidInput
from ...core.plan.plan import Plan
from ...core.service.documents import StoredPlan, StoredProfile
from ...formats.chrome_trace import chrome_trace
from ...formats.profile_csv import profile_csv
from ...formats.runtimes.registry import export
from ...formats.svg import timeline_svg
from ...planner.simulator.plan_timeline import plan_timeline
from ...schedules.plan_schedule import schedule_of
from ..errors import NoPlan
from ..store.records import read_stored

PlanFormat = Literal["plan", "svg", "chrome_trace", "schedule", "timeline", "balance"]
MEDIA_TYPES: dict[PlanFormat, tuple[str, str | None]] = {
    "plan": ("application/json", "json"),
    "svg": ("image/svg+xml", "svg"),
    "chrome_trace": ("application/json", "trace.json"),
    "schedule": ("application/json", None),
    "timeline": ("application/json", None),
    "balance": ("text/plain", None),
}
"""Media type of each format, and the file name extension of those that are files."""


class TraceFile(Record):
    """File for trace viewers such as Perfetto.

    Attributes:
        trace_events: Events in Chrome's Trace Event Format.
    """

    trace_events: tuple[dict[str, Any], ...] = Field(alias="traceEvents")
    display_time_unit: str = Field("ms", alias="displayTimeUnit")


ProfileFormat = Literal["profile", "csv"]

LISTS_ACTIONS = ("torch", "torchtitan")
"""Runtimes whose forms list every action of a step."""

MAX_ACTIONS = 100_000
"""Actions in one response, of all ranks; each takes about a hundred bytes."""


def plan_of(record: StoredPlan) -> Plan:
    """Return the plan of a record. Raises: NoPlan."""
    if record.plan is None:
        raise NoPlan(
            f"{record.id} is infeasible, so it has neither balance nor schedule: "
            f"{record.infeasible.message if record.infeasible else ''}"
        )
    return record.plan


def plan_text(record_json: str, form: PlanFormat) -> str:
    """Convert a `StoredPlan`; the largest take seconds, so this runs in a solver process.

    Raises: NoPlan, InvalidInput.
    """
    plan = plan_of(read_stored(StoredPlan, record_json, "the plan"))
    if form == "plan":
        return plan.to_json()
    if form == "balance":
        return f"{list(plan.balance)}\n"
    check_actions(plan)
    if form == "schedule":
        return schedule_of(plan).to_json()
    timeline = plan_timeline(plan)
    if form == "timeline":
        return timeline.to_json()
    return timeline_svg(plan, timeline) if form == "svg" else chrome_trace(timeline)


def check_actions(plan: Plan) -> None:
    """Refuse a plan whose step has more actions than one response lists. Raises: InvalidInput."""
    actions = 2 * plan.num_stages * plan.num_microbatches
    if actions > MAX_ACTIONS:
        raise InvalidInput(
            f"a step of this plan has {actions} actions, and at most {MAX_ACTIONS} are exported; "
            "export the plan itself (format=plan) and convert it with the library"
        )


def runtime_text(record_json: str, target: str, file: str | None) -> str:
    """Write a `StoredPlan` for another runtime; ``file`` is one that the main file reads.

    Raises: NoPlan, InvalidInput.
    """
    plan = plan_of(read_stored(StoredPlan, record_json, "the plan"))
    if target in LISTS_ACTIONS:
        check_actions(plan)
    exported = export(plan, target)
    if file is None:
        return exported.text
    if file not in exported.attachments:
        known = ", ".join(exported.attachments) or "no further files"
        raise InvalidInput(f"no file {file!r} comes with a plan for {target}; there are: {known}")
    return exported.attachments[file]


def profile_text(stored_json: str, form: ProfileFormat) -> str:
    """Convert a `StoredProfile`."""
    profile = read_stored(StoredProfile, stored_json, "the profile").profile
    return profile.to_json() if form == "profile" else profile_csv(profile)
