"""Plan a pipeline: the best split of a profile over a cluster, with a proof."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Literal, get_args

from pydantic import ValidationError

from ..core.cluster.cluster import Cluster
from ..core.document import to_invalid_input
from ..core.errors import Infeasible, InvalidInput
from ..core.plan.plan import Chosen, Plan, PlanOptions
from ..core.plan.schedule import TrainingSchedule
from ..core.profile.profile import Profile
from ..schedules import numba_jit as jit
from .assemble import build_early, build_plan
from .choose_options import choose_options, drop_auto
from .cost.chain import ChainCosts, chain_costs
from .microbatch_size import plan_batch
from .problem.input_checks import compute_deadline, parse_cluster, require_options, require_profiles
from .problem.problem import PlanningRequest, Progress
from .regular_preference import Attempt, prefer_regular
from .remedies import add_remedies, may_be_planned
from .solvers.solve import solve
from .tensor_degrees import DegreeProblem, list_choices, plan_degrees


def plan(
    profile: Profile | Sequence[Profile],
    cluster: Cluster | str,
    options: PlanOptions | None = None,
    *,
    schedule: TrainingSchedule | Literal["auto"] | None = None,
    chunks: int | Literal["auto"] | None = None,
    num_microbatches: int | Literal["auto"] | None = None,
    deadline_s: float | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Plan:
    """Return the best plan that the options allow, by their objective.

    Number of stages, cuts, replicas, recomputation and placement are chosen together and
    exactly: `Plan.proof` compares the plan's objective with a lower bound on that of all plans
    (`docs/concepts/planner.md` defines both). For ``step_time`` the plans of least objective
    compete in the simulator with uniform grids, equal layer counts and even times, and the
    fastest wins, so its own objective may be above the bound. Planning is deterministic, bit for
    bit, unless a deadline cuts the search short.

    Args:
        profile: Costs of L layers for one micro-batch; with a ``batch_size``, also several
            profiles of one model, measured at different micro-batch sizes.
        cluster: Devices and links, or shorthand such as ``4x24GB``.
        options: Options of the request; the defaults of `PlanOptions` if not given.
        schedule: Replaces the one in the options. ``"auto"`` chooses it for the profile, together
            with ``chunks`` and ``num_microbatches`` where they are ``"auto"`` too; the plan's
            options have what was chosen, its notes the reasons.
        chunks: Likewise.
        num_microbatches: Likewise. Together with a ``batch_size`` a number determines the
            micro-batch size and has to divide the batch.
        deadline_s: Stop then with the best plan so far and its gap; a note in the plan says so.
        progress: Called with every better plan or bound found, the first within moments; neither
            ever gets worse. With a ``batch_size``, values are for a whole step. `Progress.plan`
            builds the plan, for callers whose process may be ended before the search is.

    Raises:
        InvalidInput: An option or the profile's numbers are out of range, or a constraint does
            not apply to this profile.
        Infeasible: No plan fits; the message names the constraint and remedies.
        DeadlineExceeded: No plan was found in time, and none was proven impossible.
    """
    return Planner(profile).plan(
        cluster,
        options,
        schedule=schedule,
        chunks=chunks,
        num_microbatches=num_microbatches,
        deadline_s=deadline_s,
        progress=progress,
    )


class Planner:
    """Planner of one profile that caches its cost tables between calls.

    Args:
        profile: As for `plan`.

    Raises:
        InvalidInput: There is no profile.
    """

    def __init__(self, profile: Profile | Sequence[Profile]) -> None:
        self.profiles = require_profiles(profile)
        self.profile = self.profiles[0]
        self._tables: dict[tuple[int, ...], ChainCosts] = {}

    @cached_property
    def _profile_id(self) -> str:
        return self.profile.content_id()

    def tables(self, positions: tuple[int, ...]) -> ChainCosts:
        """Return the cost tables between these positions, cached for the last eight."""
        found = self._tables.pop(positions, None) or chain_costs(self.profile, positions)
        self._tables[positions] = found
        # Remedies and refined searches ask for the same few sets of positions again and again.
        while len(self._tables) > 8:
            self._tables.pop(next(iter(self._tables)))
        return found

    def plan(
        self,
        cluster: Cluster | str,
        options: PlanOptions | None = None,
        *,
        schedule: TrainingSchedule | Literal["auto"] | None = None,
        chunks: int | Literal["auto"] | None = None,
        num_microbatches: int | Literal["auto"] | None = None,
        deadline_s: float | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Plan:
        """Return the best plan; see `plan`."""
        cluster = parse_cluster(cluster)
        options = _replace_options(
            options,
            {"schedule": schedule, "chunks": chunks, "num_microbatches": num_microbatches},
        )
        deadline = compute_deadline(deadline_s)
        if progress is not None and not callable(progress):
            raise InvalidInput(f"progress is {progress!r}; give a function of one argument")
        # Of several choices, the bound of one does not hold for the others.
        has_bound = len(list_choices(self.profiles, options)) == 1
        improving = progress and _Improving(progress, has_bound=has_bound)
        with jit.deadline(deadline):
            try:
                return self._plan_all(cluster, options, deadline, improving)
            except Infeasible as error:
                given = (self.profile, cluster, drop_auto(options), self._plan_all, deadline)
                raise add_remedies(error, *given) from None

    def may_plan(self, cluster: Cluster, options: PlanOptions, *, within_s: float) -> bool:
        """Return True if some plan is found to fit in that time; options that are auto are open."""
        until = time.monotonic() + within_s
        return may_be_planned(self.profile, cluster, drop_auto(options), self._plan_all, until)

    def _plan_all(
        self,
        cluster: Cluster,
        options: PlanOptions,
        deadline: float,
        improving: Callable[[Progress], None] | None = None,
    ) -> Plan:
        """Plan for every degree and strategy that the options leave open, without remedies."""
        is_one = options.tensor == 1 and len(list_choices(self.profiles, options)) == 1
        if is_one and options.recompute != "layers":
            whole = DegreeProblem(1, self.profiles, cluster, options)
            return self._plan_degree(whole, deadline, improving)

        def plan_degree(problem: DegreeProblem, until: float) -> Plan:
            is_own = problem.profiles is self.profiles
            planner = self if is_own else Planner(problem.profiles)
            expand = partial(self._expand, problem, cluster)
            return expand(planner._plan_degree(problem, until, _expanding(improving, expand)))

        return plan_degrees(plan_degree, self.profiles, cluster, options, deadline)

    def _expand(self, problem: DegreeProblem, cluster: Cluster, made: Plan) -> Plan:
        return problem.expand(made, cluster, self._name_source(problem, made))

    def _name_source(self, problem: DegreeProblem, plan: Plan) -> str:
        """Return the `content_id` of the profile from which a problem's profile was made."""
        if len(self.profiles) > 1:
            for profile, changed in zip(self.profiles, problem.profiles, strict=True):
                if changed.content_id() == plan.profile_id:
                    return profile.content_id()
        return self._profile_id

    def _plan_degree(
        self,
        problem: DegreeProblem,
        deadline: float,
        progress: Callable[[Progress], None] | None,
    ) -> Plan:
        """Plan for devices, or for groups of devices that split layers between them."""
        cluster, size = problem.cluster, _size_asked(problem.options)
        choice = choose_options(
            self.profile,
            cluster,
            problem.options,
            self.tables,
            schedules=problem.schedules,
            deadline=deadline,
        )
        options = choice.options
        attempt: Attempt = partial(self._plan, size=size)
        if options.regular != "no" and options.regular_within is not None:
            attempt = partial(prefer_regular, attempt)
        try:
            found = attempt(cluster, options, deadline, progress)
            return found.model_copy(update={"notes": (*choice.reasons, *found.notes)})
        except Infeasible as error:
            raise _of_problem(error, problem) from None

    def _plan(
        self,
        cluster: Cluster,
        options: PlanOptions,
        deadline: float,
        progress: Callable[[Progress], None] | None = None,
        *,
        size: int | None = None,
    ) -> Plan:
        """Plan until a deadline on the clock of `time.monotonic`, without looking for remedies."""
        if options.batch_size is not None:
            return plan_batch(
                self.profiles, cluster, options, size=size, deadline=deadline, progress=progress
            )
        if len(self.profiles) > 1:
            raise InvalidInput(
                "several profiles serve to choose the micro-batch size; give a batch_size as well",
                field="/options/batch_size",
            )
        request = PlanningRequest(
            self.profile, cluster, options, self.tables, deadline=deadline, progress=progress,
            build=partial(build_early, profile_id=self._profile_id),
        )  # fmt: skip
        return build_plan(request, solve(request), self._profile_id)


def _of_problem(error: Infeasible, problem: DegreeProblem) -> Infeasible:
    """Return the error of a plan for groups of devices or with checkpoints, which says so."""
    degree, text = problem.degree, error.summary
    if degree > 1:
        text = f"with tensor={degree}, where each device stands for {degree}: {text}"
    if problem.checkpoints is not None:
        text = f"with recompute='layers': {text}"
    return Infeasible(
        text, constraint=error.constraint, required=error.required, available=error.available
    )


class _Improving:
    """Progress callback that passes on improvements only."""

    def __init__(self, tell: Callable[[Progress], None], *, has_bound: bool) -> None:
        self._tell, self._best, self._bound = tell, math.inf, 0.0
        self._has_bound = has_bound

    def __call__(self, found: Progress) -> None:
        best = min(self._best, found.value)
        bound = min(max(self._bound, found.lower_bound * self._has_bound), best)
        if best < self._best or bound > self._bound:
            made = found.plan if best < self._best else None
            self._best, self._bound = best, bound
            self._tell(Progress(found.elapsed_s, best, bound, made))


def _expanding(
    tell: Callable[[Progress], None] | None, expand: Callable[[Plan], Plan]
) -> Callable[[Progress], None] | None:
    """Return the callback with the plans that it is told of expanded."""
    return tell and (lambda found: tell(found.map(expand)))


def is_count_given(options: PlanOptions) -> bool:
    """Return True if the options give the number of micro-batches, not just its default."""
    return "num_microbatches" in options.model_fields_set - set(options.auto)


def _size_asked(options: PlanOptions) -> int | None:
    """Return the micro-batch size if the options fix both samples and micro-batches."""
    batch_size, count = options.batch_size, options.num_microbatches
    if batch_size is None or not is_count_given(options):
        return None
    if batch_size % count:
        raise InvalidInput(
            f"a batch_size of {batch_size} samples cannot be split into num_microbatches={count} "
            "equal micro-batches; omit one of the two, or choose a divisor of the batch_size",
            field="/options/num_microbatches",
        )
    return batch_size // count


def _replace_options(
    options: PlanOptions | None, asked: dict[Chosen, str | int | None]
) -> PlanOptions:
    """Return the options with those asked for beside them, where ``auto`` stands for a choice."""
    options = require_options(options)
    asked = {name: value for name, value in asked.items() if value is not None}
    if not asked:
        return options
    fields: dict[str, object] = {name: getattr(options, name) for name in options.model_fields_set}
    auto = {name for name in options.auto if name not in asked}
    for name, value in asked.items():
        if value == "auto":
            auto.add(name)
            fields.pop(name, None)
        else:
            fields[name] = value
    fields["auto"] = tuple(name for name in get_args(Chosen) if name in auto)
    if not auto:
        del fields["auto"]
    try:
        return PlanOptions.model_validate(fields)
    except ValidationError as error:
        raise to_invalid_input(error, "plan options") from None
