"""What the sliders of a plan's page may be moved to: where there is an answer."""

from __future__ import annotations

from ...core.cluster.cluster import Cluster
from ...core.document import Record
from ...core.errors import InvalidInput
from ...core.plan.plan import Plan, PlanOptions
from ...core.profile.profile import Profile
from ...planner.problem.input_checks import CHUNKED, check_options, chunks_of
from ...schedules.layout import copies, in_equal_rounds, make_layout
from ...schedules.traits import IN_ROUNDS, NAMES
from ..planning.admission import check_effort

LEAST_OFFERED = 64
TIMES_OFFERED = 4
"""Micro-batches go up to so many, or to so many times the plan's own."""


class Choice(Record):
    """A schedule in the place of a plan's own, with the same cuts.

    Attributes:
        refusal: Why these cuts cannot be run by it; empty if they can.
        least: Micro-batches: one for each replica of a stage.
        most: Micro-batches that this server still simulates.
        counts: The micro-batches it takes; `None` for any number.
        chunks: To ask for: stages a device.
        max_extra_in_flight: To ask for.
    """

    refusal: str = ""
    least: int = 1
    most: int = 1
    counts: tuple[int, ...] | None = None
    chunks: int = 2
    max_extra_in_flight: int = 0


def choices_of(plan: Plan, profile: Profile, cluster: Cluster) -> dict[str, Choice]:
    """Every schedule that trains."""
    names = [name for name in NAMES if name != "forward_only"]
    return {name: _choice(plan, profile, cluster, name) for name in names}


def _choice(plan: Plan, profile: Profile, cluster: Cluster, schedule: str) -> Choice:
    options = _options(plan, schedule)
    chunks = chunks_of(options)
    replicas = [stage.replicas for stage in plan.stages]
    places = len(replicas) // chunks
    try:
        check_options(options)
        make_layout(options.schedule, max(1, places) * replicas[0], replicas, chunks)
    except InvalidInput as error:
        return Choice(refusal=str(error))
    needed, available = sum(replicas[:places]), len(cluster.devices)
    if needed > available:
        return Choice(refusal=f"{places} stages side by side need {needed} devices of {available}")
    wanted = max(LEAST_OFFERED, TIMES_OFFERED * plan.num_microbatches)
    most = _most(profile, cluster, options, wanted)
    if schedule == plan.options.schedule:
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
    """The plan's options for another schedule, without those that only its own has."""
    own = plan.options
    if schedule == own.schedule:
        return own
    default = PlanOptions.model_fields["chunks"].default
    chunks = own.chunks if schedule in CHUNKED else default
    update = {"schedule": schedule, "max_extra_in_flight": 0, "chunks": chunks}
    return own.model_copy(update=update)


def _most(profile: Profile, cluster: Cluster, options: PlanOptions, wanted: int) -> int:
    """The most micro-batches up to a number that are not too many for this server."""
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
