"""Choice of schedule, chunks and number of micro-batches, together, where a request leaves it.

Each schedule, with each number of chunks, is simulated with a few quick splits (even times, equal
layers, cuts fitted to memory), which takes milliseconds, and the plan is then searched for once,
with the choice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from ..core.cluster.cluster import Cluster
from ..core.errors import Infeasible, InvalidInput
from ..core.plan.plan import PlanOptions
from ..core.plan.schedule import ScheduleName, TrainingSchedule
from ..core.profile.grade import relative_error
from ..core.profile.profile import Profile
from ..core.units import format_time
from .assemble import CUT_SHORT
from .cost.chain import ChainCosts
from .problem.input_checks import CHUNKED
from .problem.problem import PlanningRequest
from .solvers.simulated_search import CandidateSource
from .solvers.tournament import Tournament

SCHEDULES: tuple[TrainingSchedule, ...] = (
    "1f1b",
    "interleaved_1f1b",
    "zero_bubble",
    "interleaved_zero_bubble",
    "zbv",
    "dualpipev",
)
"""Schedules to choose from, simpler ones first. gpipe and looped_bfs are left out: with the same
stages they take no less time than 1f1b and interleaved_1f1b, and more memory."""

CHUNKS = (2, 3, 4, 6, 8)
"""Stages on a device to choose from, for schedules that take any number."""

WORTH = 0.02
"""Least part of the step that a schedule other than 1f1b has to save, however exact the profile."""

SHORT_ACTION_S = 0.01
"""Mean forward of a stage below which only 1f1b is chosen. The cost model charges nothing for the
start of an action, a message or a split backward; with 1 ms for each, stages of 0.3 ms took twice
as long as 1f1b's, and of 10 ms they take about what was predicted."""

EQUAL = 0.005
"""Relative difference within which the schedule with the lower peak of memory is taken."""

SMALL_BUBBLE = 0.1
"""Bubble that more micro-batches are to bring about."""

FEWEST = 8
MOST_PER_DEVICE = 8
"""Micro-batches tried first, and at most for each device."""

GAIN = 0.02
"""Share of the time of a micro-batch that twice as many have to save."""

SHAPES = 2
"""Pipeline lengths and replications tried for each schedule, the most promising."""


TableOf = Callable[[tuple[int, ...]], ChainCosts]
"""Looks up cost tables between given positions."""


@dataclass(frozen=True)
class ChosenOptions:
    """Options of which none is ``auto``, and the reasons in words."""

    options: PlanOptions
    reasons: tuple[str, ...] = ()


def drop_auto(options: PlanOptions) -> PlanOptions:
    """Return the options with the defaults of those that are ``auto``."""
    given = options.model_fields_set - {"auto", *options.auto}
    return PlanOptions.model_validate({name: getattr(options, name) for name in given})


def choose_options(
    profile: Profile,
    cluster: Cluster,
    options: PlanOptions,
    table_of: TableOf | None = None,
    *,
    schedules: Sequence[ScheduleName] = (),
    deadline: float = math.inf,
) -> ChosenOptions:
    """Return the options with those that are ``auto`` chosen for the shortest step.

    Micro-batches are as many as bring the bubble below 10 %: powers of two from 8 to 8 for each
    device, up to that from which twice as many save less than 2 points. With a ``batch_size`` their
    number follows from the size that planning chooses, and only the schedule is chosen. 1F1B
    stays unless another schedule shortens the step by more than the profile's own error, by 2 % at
    least, with stages whose forward takes 10 ms or more; of those within 0.5 % the one with the
    lower peak of memory is taken. For objectives but ``step_time`` nothing is chosen: the defaults
    hold.

    Args:
        profile: Costs of the layers.
        cluster: Devices and links.
        options: What the plan has to keep.
        table_of: Looks up the profile's tables; `None` to build them.
        schedules: Choose among these alone; among `SCHEDULES` if empty.
        deadline: On the clock of `time.monotonic`; of the time left, a quarter goes to the choice.

    Raises:
        InvalidInput: An option or the profile's numbers are out of range.
    """
    if not options.auto:
        return ChosenOptions(options)
    usual = drop_auto(options)
    fixed = {name: getattr(usual, name) for name in usual.model_fields_set}
    is_useless = options.auto == ("chunks",) and usual.schedule not in CHUNKED
    if options.objective != "step_time" or is_useless:
        return ChosenOptions(usual)
    names = _list_schedules(schedules) if "schedule" in options.auto else (usual.schedule,)
    study = _Study(profile, cluster, usual, table_of, _variants(names, options, usual), deadline)
    is_count_open = "num_microbatches" in options.auto and usual.batch_size is None
    counts = list(list_counts(len(cluster.devices)))
    if usual.batch_size is not None:
        counts = [study.count_for_batch()]
    elif not is_count_open:
        counts = [usual.num_microbatches]
    trial = study.choose(counts)
    if trial is None:  # nothing fits by the quick splits; planning finds a plan or says why not
        update = {"num_microbatches": counts[0]} if is_count_open else {}
        return ChosenOptions(PlanOptions.model_validate(fixed | update))
    chosen: dict[str, object] = {}
    reasons = [CUT_SHORT] * study.is_late
    if is_count_open:
        chosen["num_microbatches"] = trial.num_microbatches
        reasons.append(_why_count(trial))
    if "schedule" in options.auto:
        chosen["schedule"] = trial.best.schedule
        reasons += _why_schedule(trial, names, study.worth)
    if trial.best.schedule in CHUNKED and "chunks" in options.auto:
        chosen["chunks"] = trial.best.chunks
        reasons.append(f"{trial.best.chunks} chunks chosen with it")
    return ChosenOptions(PlanOptions.model_validate(fixed | chosen), tuple(reasons))


def _list_schedules(allowed: Sequence[ScheduleName]) -> tuple[TrainingSchedule, ...]:
    if not allowed:
        return SCHEDULES
    usual = tuple(name for name in SCHEDULES if name in allowed)
    return usual or tuple(name for name in get_args(TrainingSchedule) if name in allowed)


def rank_schedules(
    profile: Profile,
    cluster: Cluster,
    options: PlanOptions,
    table_of: TableOf,
    schedules: Sequence[ScheduleName] = (),
) -> list[TrainingSchedule]:
    """Return those of some schedules with which a quick plan fits, fastest first."""
    variants = [(name, options.chunks) for name in _list_schedules(schedules)]
    study = _Study(profile, cluster, options, table_of, variants)
    found = study.quick_plans(options.num_microbatches)
    return [plan.schedule for plan in sorted(found, key=lambda plan: plan.step_s)]


def _variants(
    names: Sequence[TrainingSchedule], asked: PlanOptions, usual: PlanOptions
) -> list[tuple[TrainingSchedule, int]]:
    """Return the schedules to try, those with a choice of chunks once for each number."""
    # Running ahead is an option of 1F1B alone.
    if usual.max_extra_in_flight:
        names = (usual.schedule,)
    found: list[tuple[TrainingSchedule, int]] = []
    asked_stages = usual.num_stages or 0
    for name in names:
        if name not in CHUNKED:
            found.append((name, PlanOptions().chunks))
        elif "chunks" in asked.auto:
            # All the stages that are asked for on one device would be no pipeline.
            found += [(name, chunks) for chunks in CHUNKS if chunks != asked_stages]
        else:
            found.append((name, usual.chunks))
    return found


@dataclass(frozen=True)
class _QuickPlan:
    """The fastest of a schedule's quick splits."""

    schedule: TrainingSchedule
    chunks: int
    step_s: float
    bubble: float
    peak_bytes: int
    action_s: float
    """Mean time of a stage's forward."""


@dataclass(frozen=True)
class _Trial:
    """Quick plans of one number of micro-batches: the chosen, 1F1B's if it fits, the fastest."""

    num_microbatches: int
    best: _QuickPlan
    plain: _QuickPlan | None
    fastest: _QuickPlan

    @property
    def microbatch_s(self) -> float:
        """The step's time for each micro-batch."""
        return self.best.step_s / self.num_microbatches

    def saves(self, fewer: _Trial) -> bool:
        """Return whether the chosen or the fastest plan is worth the additional micro-batches."""
        steps = ((self.best, fewer.best), (self.fastest, fewer.fastest))
        share = (1 - GAIN) * self.num_microbatches / fewer.num_microbatches
        return any(more.step_s <= less.step_s * share for more, less in steps)


class _Study:
    """Quick plans of a request under several schedules."""

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        options: PlanOptions,
        table_of: TableOf | None,
        variants: Sequence[tuple[TrainingSchedule, int]],
        deadline: float = math.inf,
    ) -> None:
        self.profile, self.cluster, self.table_of = profile, cluster, table_of
        self.options = options.model_copy(update={"batch_size": None})
        self.variants = variants
        shape = profile.inputs[0].shape if profile.inputs else ()
        self.samples = shape[0] if shape and shape[0] else 1
        self.batch_size = options.batch_size
        self.worth = max(WORTH, relative_error(profile))
        now_s = time.monotonic()
        self.until = now_s + (deadline - now_s) / 4

    @property
    def is_late(self) -> bool:
        """Return True once the time for the choice is over."""
        return time.monotonic() > self.until

    def count_for_batch(self) -> int:
        """Return the micro-batches of the profile's size in a batch, roughly."""
        return max(1, (self.batch_size or self.samples) // self.samples)

    def choose(self, counts: Sequence[int]) -> _Trial | None:
        """Return the fastest trial for a sample, up to a small bubble or until more save little."""
        tried: list[_Trial] = []
        for count in counts:
            trial = self._try(count)
            if trial is None:
                continue
            # Not by bubbles, which are of the devices in use: plans may use more or fewer.
            if tried and not trial.saves(tried[-1]):
                break
            tried.append(trial)
            if trial.best.bubble < SMALL_BUBBLE or self.is_late:
                break
        return min(tried, key=lambda trial: trial.microbatch_s, default=None)

    def _try(self, count: int) -> _Trial | None:
        found = self.quick_plans(count)
        if not found:
            return None
        plain = next((plan for plan in found if plan.schedule == "1f1b"), None)
        fastest = min(found, key=lambda plan: plan.step_s)
        if plain is not None:
            enough_s = plain.step_s * (1 - self.worth)
            long = [plan for plan in found if plan.action_s >= SHORT_ACTION_S]
            found = [plan for plan in long if plan.step_s <= enough_s] or [plain]
        least_s = min(plan.step_s for plan in found)
        near = [plan for plan in found if plan.step_s <= least_s * (1 + EQUAL)]
        return _Trial(count, min(near, key=lambda plan: plan.peak_bytes), plain, fastest)

    def quick_plans(self, count: int) -> list[_QuickPlan]:
        """Return a quick plan of each schedule with which one fits."""
        found: list[_QuickPlan] = []
        for name, chunks in self.variants:
            if found and self.is_late:
                break
            plan = self._quick(name, chunks, count)
            found += [plan] if plan else []
        return found

    def _quick(self, schedule: TrainingSchedule, chunks: int, count: int) -> _QuickPlan | None:
        """Return the fastest of the quick plans; `None` if none fits or the options forbid it."""
        options = self.options.model_copy(
            update={"schedule": schedule, "chunks": chunks, "num_microbatches": count}
        )
        try:
            request = PlanningRequest(
                self.profile, self.cluster, options, self.table_of, deadline=self.until
            )
        except (InvalidInput, Infeasible):
            return None
        source, tournament = CandidateSource(request), Tournament(request)
        promising = source.promising()
        # The fastest shapes may need too much memory, where a default would be a bad choice.
        tries = [promising[:SHAPES], *([shape] for shape in promising[SHAPES:]), source.roomy[:1]]
        for shapes in tries:
            tournament.add(source.candidates(shapes))
            if tournament.best is not None:
                break
        best = tournament.best
        if best is None:
            return None
        peak = max(request.cost_model.held_bytes(best.stages, best.assignment))
        action_s = sum(entry.forward.median_s for entry in self.profile.layers) / len(best.stages)
        return _QuickPlan(schedule, chunks, best.step_time_s, best.bubble_fraction, peak, action_s)


def list_counts(num_devices: int) -> Iterator[int]:
    """Yield the numbers of micro-batches to choose from, ascending."""
    count = FEWEST
    while count <= max(FEWEST, MOST_PER_DEVICE * num_devices):
        yield count
        count *= 2


def _why_count(trial: _Trial) -> str:
    chosen = f"{trial.num_microbatches} micro-batches chosen: bubble about {trial.best.bubble:.0%}"
    if trial.best.bubble < SMALL_BUBBLE:
        return chosen
    saved = f"save less than {GAIN:.0%} of the time"
    return f"{chosen}; twice as many {saved}, or take too large a batch"


def _why_schedule(trial: _Trial, tried: Sequence[TrainingSchedule], error: float) -> Iterator[str]:
    best, plain = trial.best, trial.plain
    others = [name for name in tried if name != best.schedule]
    if not others:
        return
    none = "no other is" if tried == SCHEDULES else f"none of {', '.join(others)} is"
    none = none if len(others) > 1 else f"{others[0]} is not"
    fastest = trial.fastest
    saved = 1 - fastest.step_s / plain.step_s if plain is not None else 0.0
    if best.schedule == "1f1b" and saved < WORTH:
        yield f"schedule 1f1b chosen: {none} {WORTH:.0%} faster"
    elif best.schedule == "1f1b" and saved < error:
        yield (
            f"schedule 1f1b chosen: the {saved:.0%} that {fastest.schedule} would save is within "
            f"the error of the profile, {error:.0%}"
        )
    elif best.schedule == "1f1b":
        yield (
            f"schedule 1f1b chosen: {fastest.schedule} would save {saved:.0%} if starting its "
            f"forwards of {format_time(fastest.action_s)} cost nothing"
        )
    elif plain is not None:
        yield (
            f"schedule {best.schedule} chosen: about {1 - best.step_s / plain.step_s:.0%} less "
            f"time than 1f1b, which takes {format_time(plain.step_s)}"
        )
    elif "1f1b" in tried:
        yield f"schedule {best.schedule} chosen: no split tried for 1f1b fits the devices"
    else:
        yield f"schedule {best.schedule} chosen: {none} faster"
