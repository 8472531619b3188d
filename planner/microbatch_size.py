"""Choice of the micro-batch size together with the plan, from the samples of a step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial

from ..core.cluster.cluster import Cluster
from ..core.errors import DeadlineExceeded, Infeasible, InvalidInput
from ..core.plan.plan import Plan, PlanOptions
from ..core.profile.backward_parts import microbatch_s
from ..core.profile.profile import Profile
from ..core.profile.scale import get_microbatch_size, scale_profile
from ..schedules.traits import CLOSED_FORM, SPLIT_BACKWARD
from .assemble import build_early, build_plan
from .problem.problem import PlanningRequest, Progress
from .solvers.feasibility import find_any_plan
from .solvers.solve import solve

MAX_SIZES = 12
"""Micro-batch sizes tried; each is planned separately."""

MAX_MICROBATCHES = 2**20
"""Largest value of `PlanOptions.num_microbatches`."""

PER_MICROBATCH = ("throughput", "balance_time", "pipedream")
"""Objectives of one micro-batch; sizes are compared by the value of a whole step."""

OF_BYTES = ("memory", "devices", "balance_size")
"""Objectives about bytes, which are proportional to the samples; times are not quite."""


@dataclass(frozen=True)
class Candidate:
    """Request for one micro-batch size.

    ``profile`` is scaled from ``measured``, that of the nearest size measured.
    """

    measured: Profile
    profile: Profile
    options: PlanOptions

    @property
    def size(self) -> int:
        return get_microbatch_size(self.profile)

    def least_step_s(self, cluster: Cluster) -> float:
        """Return a lower bound on every step: all work shared, or one micro-batch's passage."""
        splits = self.options.schedule in SPLIT_BACKWARD
        work_s, through_s = microbatch_s(self.profile, splits=splits)
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
    """Return the best plan over the micro-batch sizes that divide ``options.batch_size``.

    Each of `sizes_to_try` is planned with the profile measured at it, or scaled from the nearest.
    Scaling ignores that small micro-batches keep a device less busy, so sizes below all measured
    ones are only used if nothing larger can be planned. The proof is for the size chosen. With a
    ``size`` only that one is planned. Sizes not reached by the deadline, on the clock of
    `time.monotonic`, are skipped; ``progress`` is told values for a whole step.

    Raises:
        InvalidInput: A profile lacks its micro-batch size, or no size can be planned.
        Infeasible: No size fits; the error is about the smallest one.
        DeadlineExceeded: No plan was found in time.
    """
    best: Plan | None = None
    invalid: InvalidInput | None = None
    unfit: list[Candidate] = []
    started = time.monotonic()
    floor = 0 if options.objective in OF_BYTES else min(map(get_microbatch_size, profiles))
    for entry in _sort_by_trust(list_candidates(profiles, options), size, floor):
        if best is not None:
            if time.monotonic() > deadline or entry.size < floor:
                break
            if options.objective == "step_time" and entry.least_step_s(cluster) >= best.step_time_s:
                continue
        try:
            report = progress and partial(_report, progress, entry)
            request = make_request(entry, cluster, started, deadline, report)
            plan = _plan_size(entry, request) if may_fit(request) else None
        except InvalidInput as error:  # only this size is invalid, such as for too large numbers
            invalid = invalid or error
            continue
        except (Infeasible, DeadlineExceeded):
            plan = None
        if plan is None:
            unfit.append(entry)
        elif best is None or rank_plan(plan) < rank_plan(best):
            best = plan
    if best is not None:
        return _add_note(best, profiles)
    if invalid is not None and not unfit:
        raise invalid
    smallest = min(unfit, key=lambda entry: entry.size)
    return _plan_size(
        smallest, make_request(smallest, cluster, started, deadline, progress)
    )  # raises


def _sort_by_trust(entries: Iterator[Candidate], size: int | None, floor: int) -> list[Candidate]:
    """Sort sizes below ``floor`` to the end, larger ones first; drop others than ``size``."""
    chosen = [entry for entry in entries if size in (None, entry.size)]
    return sorted(chosen, key=lambda entry: max(floor - entry.size, 0))


def list_candidates(profiles: Sequence[Profile], options: PlanOptions) -> Iterator[Candidate]:
    """Yield a request for every size to try."""
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
    """Return at most `MAX_SIZES` divisors of a batch, those to try first in front.

    Measured sizes and those that differ by a power of two come first, then the others; within each
    group, the size with the least ratio to a measured one is first.
    """
    divisors = [size for size in _divisors(batch_size) if batch_size // size <= MAX_MICROBATCHES]

    def rank(size: int) -> tuple[bool, float, int]:
        ratios = [Fraction(size, known) for known in measured]
        is_doubled = any(_is_power_of_two(ratio) for ratio in ratios)
        return not is_doubled, min(_apart(known, size) for known in measured), size

    return sorted(divisors, key=rank)[:MAX_SIZES]


def make_request(
    entry: Candidate,
    cluster: Cluster,
    started: float,
    deadline: float,
    progress: Callable[[Progress], None] | None = None,
) -> PlanningRequest:
    """Return the planning request for one size."""
    return PlanningRequest(
        entry.profile,
        cluster,
        entry.options,
        started=started,
        deadline=deadline,
        progress=progress,
        build=partial(build_early, profile_id=entry.measured.content_id()),
    )


def may_fit(request: PlanningRequest) -> bool:
    """Return False if provably no plan fits."""
    if only_planning_tells(request.options):
        return True
    return find_any_plan(request, request.devices) is not None


def only_planning_tells(options: PlanOptions) -> bool:
    """Return True if only a full plan shows whether a request is feasible."""
    if options.objective.startswith(("balance", "pipedream")):
        return True
    return options.schedule not in CLOSED_FORM and options.objective != "latency"


def _plan_size(entry: Candidate, request: PlanningRequest) -> Plan:
    """Return the best plan of one size; it names the measured profile."""
    return build_plan(request, solve(request), entry.measured.content_id())


def _report(progress: Callable[[Progress], None], entry: Candidate, found: Progress) -> None:
    # Values are comparable per step; a bound of one size does not hold for the others.
    count = 1
    if entry.options.objective in PER_MICROBATCH:
        count = entry.options.num_microbatches
    progress(replace(found, value=found.value * count, lower_bound=0.0))


def _add_note(plan: Plan, profiles: Sequence[Profile]) -> Plan:
    """Return the plan with a note on the sizes that were profiled."""
    measured = ", ".join(map(str, sorted(map(get_microbatch_size, profiles))))
    note = (
        f"micro-batches of {plan.inputs[0].shape[0]} were chosen from a profile of {measured} "
        "alone: what smaller ones cost was not measured, and is told by profiles of several sizes"
        if len(profiles) == 1
        else f"micro-batches of {plan.inputs[0].shape[0]} were chosen; profiled were {measured}"
    )
    return plan.model_copy(update={"notes": (*plan.notes, note)})


def rank_plan(plan: Plan) -> tuple[float, float, int]:
    """Return what plans of one request are compared by: the objective, then the step."""
    value = plan.proof.value
    if plan.options.objective in PER_MICROBATCH:
        value *= plan.options.num_microbatches
    return value, plan.step_time_s, plan.options.num_microbatches


def _check_alike(profiles: Sequence[Profile], measured: dict[int, Profile]) -> None:
    if len(measured) < len(profiles):
        raise InvalidInput("two profiles have the same micro-batch size; give one per size")
    names = {tuple(entry.layer.name for entry in profile.layers) for profile in profiles}
    if len(names) > 1:
        raise InvalidInput(
            "profiles of several micro-batch sizes must be of one model with the same layers; "
            "these have different layers"
        )


def _divisors(number: int) -> list[int]:
    small = [factor for factor in range(1, math.isqrt(number) + 1) if number % factor == 0]
    return sorted({*small, *(number // factor for factor in small)})


def _apart(one: int, other: int) -> float:
    return abs(math.log2(one / other))


def _is_power_of_two(ratio: Fraction) -> bool:
    return (
        ratio.numerator & (ratio.numerator - 1) == 0 == ratio.denominator & (ratio.denominator - 1)
    )
