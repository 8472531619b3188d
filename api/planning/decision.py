"""The decision on a planning request, made in a solver process: a plan, or the proof of none.

Solver processes import this module; what only the server needs would make them start later.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...core.cluster.cluster import Cluster
from ...core.errors import Infeasible, InvalidInput
from ...core.plan.plan import Plan, PlanOptions
from ...core.profile.profile import Profile
from ...core.service.documents import PlanRecord, to_infeasible_answer
from ...core.units import format_bytes
from ...planner.assemble import was_cut_short
from ...planner.plan import plan
from ...planner.problem.problem import Progress
from .solver_process import report_best

MAX_RECORD_BYTES = 4 * 2**20
"""JSON of a plan record; one for 16,384 devices and 1,000 layers has less than half of it."""


def is_final(record: PlanRecord) -> bool:
    """Return True if more time would not improve the result, so that it may be reused."""
    return record.plan is None or not was_cut_short(record.plan)


def decide(
    profiles: Sequence[Profile], cluster: Cluster, options: PlanOptions, deadline_s: float
) -> PlanRecord:
    """Plan, and return infeasibility as a result.

    The result names the profile that was chosen; if nothing fits, the first. Each better plan
    on the way is reported as a result of its own.
    """

    def tell(progress: Progress) -> None:
        build = progress.plan
        if build is None:
            report_best(progress)
        else:
            report_best(progress, lambda: _text(_record(build(), cluster, options)))

    try:
        found = plan(profiles, cluster, options, deadline_s=deadline_s, progress=tell)
    except Infeasible as error:
        record = PlanRecord(
            status="infeasible",
            profile_id=profiles[0].content_id(),
            cluster=cluster,
            options=options,
            infeasible=to_infeasible_answer(error),
        )
    else:
        record = _record(found, cluster, options)
    _text(record)
    return record


def _text(record: PlanRecord) -> str:
    """Return a record as JSON. Raises: InvalidInput, if that is too large to be stored."""
    # A plan repeats the devices and the profile's notes and modules: a hundred bytes that name a
    # stored profile would otherwise add all of its 16 MiB to the database, each time.
    text = record.model_dump_json()
    size = len(text)
    if size > MAX_RECORD_BYTES:
        raise InvalidInput(
            f"the plan, with its devices and the profile's notes and modules, takes "
            f"{format_bytes(size)}, and at most {format_bytes(MAX_RECORD_BYTES)} are stored; plan "
            "for fewer devices, shorten the profile's notes, or plan with the library"
        )
    return text


def _record(found: Plan, cluster: Cluster, options: PlanOptions) -> PlanRecord:
    return PlanRecord(
        status="planned",
        profile_id=found.profile_id,
        cluster=cluster,
        # What was left to the planner is stored as chosen, for all that is asked about it.
        options=found.options if options.auto else options,
        plan=found,
    )
