"""Ranges of the sliders on a plan's page, limited to what the simulator can answer."""

from __future__ import annotations

from ...core.cluster.cluster import Cluster
from ...core.document import Record
from ...core.errors import InvalidInput
from ...core.plan.plan import Plan, PlanOptions
from ...core.profile.profile import Profile
from ...planner.problem.input_checks import CHUNKED, check_options, count_chunks
from ...schedules.layout import copies, in_equal_rounds, make_layout
from ...schedules.traits import IN_ROUNDS, NAMES
from ..planning.requests import check_effort

LEAST_OFFERED = 64
TIMES_OFFERED = 4
"""The slider of micro-batches ends at the larger of `LEAST_OFFERED` and this multiple of the
plan's own number."""


class Choice(Record):
    """Another schedule for a plan, with the same cuts.

    Attributes:
        refusal: Why the schedule cannot run these cuts; empty if it can.
        least: Fewest micro-batches: one per replica of a stage.
        most: Most micro-batches that this server simulates.
        counts: Numbers of micro-batches that the schedule accepts; `None` for any.
        chunks: Stages per device, for the request.
        max_extra_in_flight: For the request.
    """

    refusal: str = ""
    least: int = 1
    most: int = 1
    counts: tuple[int, ...] | None = None
    chunks: int = 2
    max_extra_in_flight: int = 0


def choices_of(plan: Plan, profile: Profile, cluster: Cluster) -> dict[str, Choice]:
    """Return the choice for every training schedule."""
    names = [name for name in NAMES if name != "forward_only"]
    return {name: _choice(plan, profile, cluster, name) for name in names}


def _choice(plan: Plan, profile: Profile, cluster: Cluster, schedule: str) -> Choice:
    options = _options(plan, schedule)
    chunks = count_chunks(options)
    replicas = [stage.replicas for stage in plan.stages]
    places = len(replicas) // chunks
    try:
        check_options(options)
        make_layout(options.schedule, max(1, places) * replicas[0], replicas, chunks)
    except InvalidInput as error:
        return Choice(refusal=str(error))
    # Stages that share a device by chunks need it once.
    needed, available = sum(replicas[:places]), len(cluster.devices)
    if needed > available:
        return Choice(refusal=f"{places} stages side by side need {needed} devices of {available}")
    wanted = max(LEAST_OFFERED, TIMES_OFFERED * plan.num_microbatches)
    most = _most(profile, cluster, options, wanted)
    if schedule == plan.options.schedule:
        # The stored plan must stay reachable, whatever this server's limits are now.
        most = max(most, plan.num_microbatches)
    counts = None
    if schedule in IN_ROUNDS:
        counts = tuple(
            count
            for count in range(max(replicas), most + 1)
            if all(in_equal_rounds(part, places) for part in copies(count, replicas[0]))
        )
    return Choice(
        least=max(replicas),
        most=most,
        counts=counts,
        chunks=options.chunks,
        max_extra_in_flight=options.max_extra_in_flight,
    )


def _options(plan: Plan, schedule: str) -> PlanOptions:
    """Return the plan's options for another schedule, without those that only its own takes."""
    own = plan.options
    if schedule == own.schedule:
        return own
    default = PlanOptions.model_fields["chunks"].default
    chunks = own.chunks if schedule in CHUNKED else default
    update = {"schedule": schedule, "max_extra_in_flight": 0, "chunks": chunks}
    return own.model_copy(update=update)


def _most(profile: Profile, cluster: Cluster, options: PlanOptions, wanted: int) -> int:
    """Return the most micro-batches that this server admits, up to a number."""
    # By bisection: whatever admits a number admits every smaller one.
    least, most = 1, wanted
    while least < most:
        middle = (least + most + 1) // 2
        try:
            check_effort(
                [profile], cluster, options.model_copy(update={"num_microbatches": middle})
            )
            least = middle
        except InvalidInput:
            most = middle - 1
    return least
