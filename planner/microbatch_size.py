"""The size of micro-batches, chosen together with the plan from the samples of a step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

from ..core.cluster.cluster import Cluster
from ..core.errors import DeadlineExceeded, Infeasible, InvalidInput
from ..core.plan.plan import Plan, PlanOptions
from ..core.profile.profile import Profile
from ..core.profile.scale import get_microbatch_size, scale_profile
from ..schedules.traits import CLOSED_FORM, SPLIT_BACKWARD
from .assemble import build_plan
from .problem.problem import PlanningRequest, Progress
from .solvers.feasibility import any_plan
from .solvers.solve import solve

MAX_SIZES = 12
"""Micro-batch sizes tried; each is planned on its own."""

MAX_MICROBATCHES = 2**20
"""As many as `PlanOptions.num_microbatches` takes."""

PER_MICROBATCH = ("throughput", "balance_time", "pipedream")
"""Objectives that count one micro-batch of a step; sizes are compared by all of them."""

OF_BYTES = ("memory", "devices", "balance_size")
"""Objectives about bytes, which do grow in proportion to the samples; times do not quite."""


@dataclass(frozen=True)
class Candidate:
    """One size of micro-batches.

    Attributes:
        profile: Scaled to it from ``measured``, or the same.
        options: With its number of micro-batches.
    """

    measured: Profile
    profile: Profile
    options: PlanOptions

    def least_step_s(self, cluster: Cluster) -> float:
        """No plan's step is below: all work on all devices, one micro-batch on the fastest."""
        timings = [(entry.forward, entry.backward) for entry in self.profile.layers]
        if self.profile.loss:
            timings.append((self.profile.loss.forward, self.profile.loss.backward))
        forward_s = math.fsum(one.median_s for one, _ in timings)
        backward_s = math.fsum(other.median_s for _, other in timings)
        work_s = forward_s + backward_s
        splits = self.options.schedule in SPLIT_BACKWARD
        through_s = forward_s + backward_s / 2 if splits else work_s
        speeds = [device.speed for device in cluster.devices]
        share_s = self.options.num_microbatches * work_s / math.fsum(speeds)
        return max(share_s, through_s / max(speeds)) * (1 - 1e-9)


def plan_batch(
    profiles: Sequence[Profile],
    cluster: Cluster,
    options: PlanOptions,
    *,
    size: int | None = None,
    deadline: float = math.inf,
    progress: Callable[[Progress], None] | None = None,
) -> Plan:
    """The best plan over the micro-batch sizes that divide ``options.batch_size``.

    Sizes are `sizes_to_try`; a profile measured at a size is used for it, others are scaled from
    the nearest (`scale_profile`). Small micro-batches keep a device less busy, which no scaling
    knows: sizes below all that were measured would look free. So they are not chosen for speed:
    only if nothing larger can be planned, and then the largest that can. Sizes that cannot beat
    the best step found are not planned. Plans of the same value are told apart by their step,
    then by fewer micro-batches. The plan's proof is for the size chosen.

    Args:
        profiles: Of one model, at different sizes.
        cluster: Devices and links.
        options: With a ``batch_size``; its ``num_microbatches`` does not matter.
        size: The only one to plan; `None` for all.
        deadline: On the clock of `time.monotonic`; sizes not reached by then are left out.
        progress: Called with every better plan found at any size, its value for a whole step.

    Raises:
        InvalidInput: A profile says nothing about its size, or no size can be planned.
        Infeasible: No size fits; about the smallest one.
        DeadlineExceeded: No plan was found in time.
    """
    best: Plan | None = None
    refused: InvalidInput | None = None
    unfit: list[Candidate] = []
    started = time.monotonic()
    entries = [
        entry
        for entry in candidates(profiles, options)
        if size in (None, get_microbatch_size(entry.profile))
    ]
    floor = 0 if options.objective in OF_BYTES else min(map(get_microbatch_size, profiles))
    entries.sort(key=lambda entry: max(floor - get_microbatch_size(entry.profile), 0))
    for entry in entries:
        if best is not None:
            if time.monotonic() > deadline or get_microbatch_size(entry.profile) < floor:
                break
            is_slower = entry.least_step_s(cluster) >= best.step_time_s
            if options.objective == "step_time" and is_slower:
                continue
        try:
            told = progress and partial(_tell, progress, entry)
            request = request_of(entry, cluster, started, deadline, told)
            plan = _planned(entry, request) if may_fit(request) else None
        except InvalidInput as error:  # of this size: numbers too large, more stages than work
            refused = refused or error
            continue
        except (Infeasible, DeadlineExceeded):
            plan = None
        if plan is None:
            unfit.append(entry)
        elif best is None or _rank(plan) < _rank(best):
            best = plan
    if best is not None:
        return _with_note(best, profiles)
    if not unfit:
        assert refused is not None, "a batch has at least one size"
        raise refused
    smallest = min(unfit, key=lambda entry: get_microbatch_size(entry.profile))
    return _planned(smallest, request_of(smallest, cluster, started, deadline, progress))


def candidates(profiles: Sequence[Profile], options: PlanOptions) -> Iterator[Candidate]:
    """Every size to try, as a request of its own.

    Raises:
        InvalidInput: A profile says nothing about its size, two have the same, or they are of
            different models.
    """
    measured = {get_microbatch_size(profile): profile for profile in profiles}
    _check_alike(profiles, measured)
    batch_size = options.batch_size
    assert batch_size is not None, "asked for a batch"
    for size in sizes_to_try(batch_size, tuple(measured)):
        nearest = min(measured, key=lambda known: (_apart(known, size), known))
        yield Candidate(
            measured[nearest],
            scale_profile(measured[nearest], Fraction(size, nearest)),
            options.model_copy(update={"num_microbatches": batch_size // size}),
        )


def sizes_to_try(batch_size: int, measured: tuple[int, ...]) -> list[int]:
    """Micro-batch sizes that divide a batch, at most `MAX_SIZES`, those to try first in front.

    All divisors that leave at most `MAX_MICROBATCHES`, if they are few. Otherwise sizes that were
    measured, then powers of two times a measured one, then others, each the nearer to a measured
    size by their ratio the earlier.
    """
    divisors = [size for size in _divisors(batch_size) if batch_size // size <= MAX_MICROBATCHES]

    def rank(size: int) -> tuple[bool, float, int]:
        ratios = [Fraction(size, known) for known in measured]
        is_doubled = any(_is_power_of_two(ratio) for ratio in ratios)
        return not is_doubled, min(_apart(known, size) for known in measured), size

    return sorted(divisors, key=rank)[:MAX_SIZES]


def request_of(
    entry: Candidate,
    cluster: Cluster,
    started: float,
    deadline: float,
    progress: Callable[[Progress], None] | None = None,
) -> PlanningRequest:
    """The planning request for one size."""
    return PlanningRequest(
        entry.profile,
        cluster,
        entry.options,
        started=started,
        deadline=deadline,
        progress=progress,
    )


def may_fit(request: PlanningRequest) -> bool:
    """Whether some plan fits; also `True` where only planning can tell."""
    if only_planning_tells(request.options):
        return True
    return any_plan(request, request.devices) is not None


def only_planning_tells(options: PlanOptions) -> bool:
    """Whether fitting cannot be told apart: no closed form, or cuts that know no memory."""
    if options.objective.startswith(("balance", "pipedream")):
        return True
    return options.schedule not in CLOSED_FORM and options.objective != "latency"


def _planned(entry: Candidate, request: PlanningRequest) -> Plan:
    """The best plan of one size, known by the profile that was measured."""
    plan = build_plan(request, solve(request))
    return plan.model_copy(update={"profile_id": entry.measured.content_id()})


def _tell(progress: Callable[[Progress], None], entry: Candidate, found: Progress) -> None:
    """Values of different sizes compared; a bound of one size says nothing about the others."""
    count = 1
    if entry.options.objective in PER_MICROBATCH:
        count = entry.options.num_microbatches
    progress(Progress(found.elapsed_s, found.value * count))


def _with_note(plan: Plan, profiles: Sequence[Profile]) -> Plan:
    """Which sizes the plan's could be compared with."""
    measured = ", ".join(map(str, sorted(map(get_microbatch_size, profiles))))
    note = (
        f"micro-batches of {plan.inputs[0].shape[0]} were chosen from a profile of {measured} "
        "alone: what smaller ones cost was not measured, and is told by profiles of several sizes"
        if len(profiles) == 1
        else f"micro-batches of {plan.inputs[0].shape[0]} were chosen; profiled were {measured}"
    )
    return plan.model_copy(update={"notes": (*plan.notes, note)})


def _rank(plan: Plan) -> tuple[float, float, int]:
    objective, value = plan.options.objective, plan.proof.value
    if objective == "step_time":
        value = plan.step_time_s
    elif objective in PER_MICROBATCH:
        value *= plan.options.num_microbatches
    return value, plan.step_time_s, plan.options.num_microbatches


def _check_alike(profiles: Sequence[Profile], measured: dict[int, Profile]) -> None:
    if len(measured) < len(profiles):
        raise InvalidInput("two profiles are of the same micro-batch size; give one of each")
    names = {tuple(entry.layer.name for entry in profile.layers) for profile in profiles}
    if len(names) > 1:
        raise InvalidInput(
            "profiles of different micro-batch sizes have to be of one model, cut into the same "
            "layers; these have different layers"
        )


def _divisors(number: int) -> list[int]:
    small = [factor for factor in range(1, math.isqrt(number) + 1) if number % factor == 0]
    return sorted({*small, *(number // factor for factor in small)})


def _apart(one: int, other: int) -> float:
    """How far apart two sizes are, by their ratio."""
    return abs(math.log2(one / other))


def _is_power_of_two(ratio: Fraction) -> bool:
    return (
        ratio.numerator & (ratio.numerator - 1) == 0 == ratio.denominator & (ratio.denominator - 1)
    )
