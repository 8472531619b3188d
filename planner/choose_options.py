"""ChosenOptions of schedule and number of micro-batches, where the request leaves them open.

Each schedule is simulated with a few quick splits (even times, equal layers, cuts fitted to
memory), which takes milliseconds, and the plan is then searched for once, with the choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..core.cluster.cluster import Cluster
from ..core.errors import Infeasible, InvalidInput
from ..core.plan.plan import PlanOptions
from ..core.plan.schedule import ScheduleName, TrainingSchedule
from ..core.profile.profile import Profile
from ..core.units import format_time
from .plan import Planner
from .problem.input_checks import parse_cluster, require_options
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

WORTH = 0.02
"""Part of the step that another schedule than 1f1b has to save."""

EQUAL = 0.005
"""Relative difference within which the schedule with the lower peak of memory is taken."""

SMALL_BUBBLE = 0.1
"""Bubble that more micro-batches are to bring about."""

FEWEST = 8
MOST_PER_DEVICE = 8
"""Micro-batches tried first, and at most for each device."""

GAIN = 0.02
"""Bubble, absolute, that twice as many micro-batches have to save."""

SHAPES = 2
"""Pipeline lengths and replications tried for each schedule, the most promising."""


@dataclass(frozen=True)
class ChosenOptions:
    """Options with a schedule and number of micro-batches, and the reasons in words."""

    options: PlanOptions
    reasons: tuple[str, ...] = ()


def choose_options(
    profile: Profile | Sequence[Profile],
    cluster: Cluster | str,
    options: PlanOptions | None = None,
    *,
    schedule: bool = True,
    num_microbatches: bool = True,
    schedules: Sequence[ScheduleName] = (),
) -> ChosenOptions:
    """Return the options with schedule and number of micro-batches chosen for the shortest step.

    Micro-batches are as many as bring the bubble below 10 %: powers of two from 8 to 8 for each
    device, up to that from which twice as many save less than 2 points. With a ``batch_size`` their
    number follows from the size that planning chooses, and only the schedule is chosen. 1F1B
    stays unless another schedule makes the step at least 2 % shorter; of those within 0.5 % the
    one with the lower peak of memory is taken. Objectives but ``step_time`` are left alone.

    Args:
        profile: As for `plan`.
        cluster: Devices and links, or shorthand.
        options: What else the plan has to keep.
        schedule: Choose the schedule.
        num_microbatches: Choose the number of micro-batches.
        schedules: Choose among these alone; all if empty.

    Raises:
        InvalidInput: An option or the profile's numbers are out of range.
    """
    planner, cluster = Planner(profile), parse_cluster(cluster)
    options = require_options(options)
    if options.objective != "step_time":
        return ChosenOptions(options)
    given_batch = options.batch_size is not None
    known = tuple(name for name in SCHEDULES if name in schedules) if schedules else SCHEDULES
    tried = known if schedule and known else (options.schedule,)
    study = _Study(planner, cluster, options, tried)
    counts = [options.num_microbatches]
    if given_batch:
        counts = [study.count_for_batch()]
    elif num_microbatches:
        counts = list(_counts(len(cluster.devices)))
    trial = study.choose(counts)
    if trial is None:  # nothing fits by the quick splits; planning finds a plan or says why not
        return ChosenOptions(options.model_copy(update={"num_microbatches": counts[0]}))
    update: dict[str, object] = {}
    reasons = []
    if num_microbatches and not given_batch:
        update["num_microbatches"] = trial.num_microbatches
        reasons.append(_why_count(trial))
    if schedule:
        update["schedule"] = trial.best.schedule
        reasons.append(_why_schedule(trial))
    return ChosenOptions(options.model_copy(update=update), tuple(reasons))


def rank_schedules(
    planner: Planner, cluster: Cluster, options: PlanOptions
) -> list[TrainingSchedule]:
    """Return the schedules with which a quick plan fits, fastest first."""
    study = _Study(planner, cluster, options, SCHEDULES)
    found = study.quick_plans(options.num_microbatches)
    return [plan.schedule for plan in sorted(found, key=lambda plan: plan.step_s)]


@dataclass(frozen=True)
class _QuickPlan:
    """The fastest of a schedule's quick splits."""

    schedule: TrainingSchedule
    step_s: float
    bubble: float
    peak_bytes: int


@dataclass(frozen=True)
class _Trial:
    """Quick plans of one number of micro-batches: the best one, and 1F1B's if it fits."""

    num_microbatches: int
    best: _QuickPlan
    plain: _QuickPlan | None


class _Study:
    """Quick plans of a request under several schedules."""

    def __init__(
        self,
        planner: Planner,
        cluster: Cluster,
        options: PlanOptions,
        schedules: Sequence[TrainingSchedule],
    ) -> None:
        self.planner, self.cluster = planner, cluster
        self.options = options.model_copy(update={"batch_size": None})
        # Running ahead is an option of 1F1B alone.
        self.schedules = schedules if not options.max_extra_in_flight else (options.schedule,)
        shape = planner.profile.inputs[0].shape if planner.profile.inputs else ()
        self.samples = shape[0] if shape and shape[0] else 1
        self.batch_size = options.batch_size

    def count_for_batch(self) -> int:
        """Return the micro-batches of the profile's size in a batch, roughly."""
        return max(1, (self.batch_size or self.samples) // self.samples)

    def choose(self, counts: Sequence[int]) -> _Trial | None:
        """Return the first trial with a small bubble, or that from which more save little."""
        last = None
        for count in counts:
            trial = self._try(count)
            if trial is None:
                continue
            if last is not None and last.best.bubble - trial.best.bubble < GAIN:
                return last
            last = trial
            if trial.best.bubble < SMALL_BUBBLE:
                break
        return last

    def _try(self, count: int) -> _Trial | None:
        found = self.quick_plans(count)
        if not found:
            return None
        plain = next((plan for plan in found if plan.schedule == "1f1b"), None)
        least_s = min(plan.step_s for plan in found)
        if plain is not None and least_s > plain.step_s * (1 - WORTH):
            return _Trial(count, plain, plain)
        near = [plan for plan in found if plan.step_s <= least_s * (1 + EQUAL)]
        return _Trial(count, min(near, key=lambda plan: plan.peak_bytes), plain)

    def quick_plans(self, count: int) -> list[_QuickPlan]:
        """Return a quick plan of each schedule with which one fits."""
        return [plan for name in self.schedules if (plan := self._quick(name, count))]

    def _quick(self, schedule: TrainingSchedule, count: int) -> _QuickPlan | None:
        """Return the fastest of the quick plans; `None` if none fits or the options forbid it."""
        options = self.options.model_copy(update={"schedule": schedule, "num_microbatches": count})
        try:
            request = PlanningRequest(
                self.planner.profile, self.cluster, options, self.planner.tables
            )
        except (InvalidInput, Infeasible):
            return None
        source, tournament = CandidateSource(request), Tournament(request)
        tournament.add(source.candidates(source.promising()[:SHAPES]))
        best = tournament.best
        if best is None:
            return None
        peak = max(request.cost_model.held_bytes(best.stages, best.assignment))
        return _QuickPlan(schedule, best.step_time_s, best.bubble_fraction, peak)


def _counts(num_devices: int) -> Iterator[int]:
    count = FEWEST
    while count <= max(FEWEST, MOST_PER_DEVICE * num_devices):
        yield count
        count *= 2


def _why_count(trial: _Trial) -> str:
    chosen = f"{trial.num_microbatches} micro-batches chosen: bubble about {trial.best.bubble:.0%}"
    if trial.best.bubble < SMALL_BUBBLE:
        return chosen
    return f"{chosen}; more would shrink it little, or take too large a batch"


def _why_schedule(trial: _Trial) -> str:
    best, plain = trial.best, trial.plain
    if best.schedule == "1f1b":
        return f"schedule 1f1b chosen: no other is {WORTH:.0%} faster"
    if plain is None:
        return f"schedule {best.schedule} chosen: 1f1b does not fit"
    return (
        f"schedule {best.schedule} chosen: about {1 - best.step_s / plain.step_s:.0%} less time "
        f"than 1f1b, which takes {format_time(plain.step_s)}"
    )
