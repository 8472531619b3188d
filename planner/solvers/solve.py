"""Answer a request: the search, the simulator's choice, and the bounds, by objective."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ...core.errors import DeadlineExceeded, InvalidInput
from ...core.plan.plan import Objective
from ..cost.assignment import Assignment
from ..cost.plan_cost import Priced, Pricer
from ..cost.stage_table import StageTable
from ..heuristics.baselines import take_faster_baseline
from ..heuristics.candidates import move_cuts, pipedream_plans, reshape_stages, uniform_grids
from ..problem.constraints import search_parts
from ..problem.problem import PlanningRequest, all_parts
from ..search.arcs import Measure, to_assignment
from ..search.branch_and_bound import GAVE_UP, ROUNDING, BranchAndBound, Effort
from ..search.label_setting import StageArc
from .balance_objectives import balanced
from .feasibility import any_plan, out_of_memory
from .replica_rounding import filled
from .simulated_search import best_of_schedule, rescue
from .tournament import Race
from .warmup_depth import deepen

COARSE_ATOMS = (32, 96, 300)
"""Positions of the quick searches whose plans start the exact one."""

MAX_SIMULATED = 40
"""Plans of the search that compete in the simulator."""

MAX_ROUNDS = 12
"""How often cuts of the fastest plans are moved."""

MAX_STARTS = 3
"""Plans whose cuts are moved in each round, of different numbers of stages."""

NEAR = 0.08
"""How far above the best objective, relatively, a plan may be to be simulated."""

NOT_STEPS = ("memory", "devices")
"""Objectives whose plans are searched by another measure than they are compared by."""

MEASURES: dict[str, Measure] = {"1f1b": "1f1b", "gpipe": "gpipe"}
"""Schedules whose step the search minimises itself."""


@dataclass(frozen=True)
class Decision:
    """The plan chosen and what is known about all others.

    Attributes:
        lower_bound: No plan's objective is below.
        simulated_bound_s: No plan's simulated step is below.
        best_value: Least objective of all plans found, this one's if not told.
    """

    priced: Priced
    lower_bound: float
    simulated_bound_s: float
    best_value: float = math.inf


@dataclass
class Pool:
    """Plans found so far, by the value the search gave them.

    Attributes:
        gave_up: Whether the search ended without a plan, and without a proof that there is none.
    """

    pricer: Pricer
    values: dict[Assignment, float] = field(default_factory=dict)
    gave_up: bool = False

    def add(self, assignment: Assignment, value: float) -> None:
        self.values[assignment] = min(value, self.values.get(assignment, math.inf))

    def best(self, most: int) -> list[Assignment]:
        """The best ones, and that of each number of stages; none much worse than the best.

        On whole groups of devices where that is as good.
        """
        order = sorted(self.values, key=lambda entry: (self.values[entry], entry))
        if not order:
            return []
        limit = self.values[order[0]] * (1 + NEAR)
        of_count: dict[int, Assignment] = {}
        for entry in order:
            of_count.setdefault(entry.num_stages, entry)
        chosen = dict.fromkeys([*order[:most], *of_count.values()])
        near = [entry for entry in chosen if self.values[entry] <= limit]
        return list(dict.fromkeys(filled(entry, self.pricer) for entry in near))


def solve(request: PlanningRequest) -> Decision:
    """The best plan by the objective asked for.

    Raises:
        Infeasible: There is none.
        InvalidInput: The objective is not defined for the schedule asked for.
        DeadlineExceeded: None was found in time.
    """
    options = request.options
    if options.objective not in ("step_time", "latency") and options.schedule not in MEASURES:
        raise InvalidInput(
            f"the objective {options.objective!r} is planned for the gpipe and 1f1b schedules, "
            f"not for {options.schedule!r}",
            field="/options/schedule",
        )
    decision = SOLVERS[options.objective](request)
    if options.skips == "direct" and options.objective == "step_time":
        decision = _no_slower_than_relays(request, decision)
    value = min(decision.best_value, decision.priced.value)
    request.tell(value, min(decision.lower_bound, value))
    return decision


def _no_slower_than_relays(request: PlanningRequest, decision: Decision) -> Decision:
    """The decision, or that of a search which relays all values where its plan is faster.

    Both ways of every candidate compete, but which candidates there are follows from the fastest.
    """
    if request.is_over or not request.pricer.knows_readers:
        return decision
    options = request.options.model_copy(update={"skips": "relay"})
    try:
        relayed = _step_time(replace(request, options=options, progress=None))
    except DeadlineExceeded:
        return decision
    other = request.pricer.price(relayed.priced.assignment)
    return (
        decision
        if decision.priced.step_time_s <= other.step_time_s
        else replace(decision, priced=other)
    )


def _step_time(request: PlanningRequest) -> Decision:
    """Search by the closed form, choose by simulation."""
    if request.options.schedule not in MEASURES:
        priced, bound_s = best_of_schedule(request)
        priced = _or_its_baselines(request, priced)
        return Decision(priced, bound_s, bound_s)
    pool, bound = _search(request, MEASURES[request.options.schedule])
    priced = _fastest(request, pool)
    bound = max(bound, _work_s(request))
    best_value = min(pool.values.values(), default=priced.value)
    bound = min(bound, priced.value)
    return Decision(priced, bound, _simulated_bound(request, priced), best_value)


def _by_measure(measure: Measure) -> Callable[[PlanningRequest], Decision]:
    """Solvers of objectives that the search minimises itself."""

    def solver(request: PlanningRequest) -> Decision:
        pool, bound = _search(request, measure)
        priced = _first(request, pool)
        return Decision(priced, min(bound, priced.value), _simulated_bound(request, priced))

    return solver


def _devices(request: PlanningRequest) -> Decision:
    """Fewest devices first; among plans with as many, the least step."""
    effort = Effort(request.deadline)
    fewest, found, is_proven = math.inf, None, request.is_whole
    for part in all_parts(request, request.devices):
        search = BranchAndBound(part.space, _model(request), effort)
        try:
            paths = search.find_every_count()
        except DeadlineExceeded:
            is_proven = False
            continue
        least = min(paths, key=lambda path: path.num_replicas, default=None)
        if least is not None and least.num_replicas < fewest:
            fewest, found = least.num_replicas, _assignment(least.arcs, search)
    if found is None and is_proven:
        raise out_of_memory(request)
    pool, _ = _search(request, _model(request), max_total_replicas=int(fewest) if found else None)
    if found is not None:
        pool.add(found, math.inf)
    priced = _first(request, pool)
    bound = float(fewest) if found and is_proven else float(request.options.num_stages or 1)
    return Decision(priced, bound, _simulated_bound(request, priced))


def _memory(request: PlanningRequest) -> Decision:
    """The least limit under which there is a plan; among those plans, the least step.

    Bisection between a limit nothing fits and the largest device of a plan that was found.
    """
    try:
        found = any_plan(request, request.devices)
    except DeadlineExceeded:
        priced = _fastest(request, Pool(request.pricer, gave_up=True))
        return Decision(priced, 0.0, _simulated_bound(request, priced))
    if found is None:
        raise out_of_memory(request)
    low, high = -1, _largest_bytes(request, found)
    least = found
    while high - low > 1:
        middle = (low + high) // 2
        try:
            found = any_plan(request, request.devices.limited(middle))
        except DeadlineExceeded:
            break
        if found is None:
            low = middle
        else:
            high, least = _largest_bytes(request, found), found
        request.tell(float(high), float(low + 1) if request.is_whole else 0.0)
    pool, _ = _search(request, _model(request), limit_bytes=high)
    priced = request.pricer.price(pool.best(1)[0] if pool.values else least)
    bound = min(priced.value, float(low + 1))
    if not request.is_whole:
        bound = float(request.order_free.state_bytes) if request.order_free else 0.0
    return Decision(priced, bound, _simulated_bound(request, priced))


def _first(request: PlanningRequest, pool: Pool) -> Priced:
    """The best plan of the search; one of the candidates if it was given up without any."""
    return request.pricer.price(pool.best(1)[0]) if pool.values else _fastest(request, pool)


def _largest_bytes(request: PlanningRequest, assignment: Assignment) -> int:
    return max(stage.memory.total_bytes for stage in request.pricer.stages(assignment))


def _balance(request: PlanningRequest) -> Decision:
    """The largest stage as small as possible; stage s on device s.

    Raises:
        InvalidInput: Layers may be reordered, which these objectives know nothing of.
    """
    if request.branches is not None:
        raise InvalidInput(
            f"the objective {request.options.objective!r} cuts the profile's own order; plan for "
            "'step_time', or ask for layer_order 'given'",
            field="/options/layer_order",
        )
    priced, bound = balanced(request)
    return Decision(priced, bound, _simulated_bound(request, priced))


SOLVERS: dict[Objective, Callable[[PlanningRequest], Decision]] = {
    "step_time": _step_time,
    "throughput": _by_measure("throughput"),
    "latency": _by_measure("latency"),
    "memory": _memory,
    "devices": _devices,
    "balance_time": _balance,
    "balance_size": _balance,
    "pipedream": _balance,
}


def _model(request: PlanningRequest) -> Measure:
    return MEASURES[request.options.schedule]


@dataclass(frozen=True)
class Level:
    """One of the searches of a request, the quickest first.

    Attributes:
        stages: Makes what is searched; `None` if there is nothing to search.
        gap: Good enough.
        is_exact: Whether all plans are among it, not only some.
    """

    stages: Callable[[], StageTable | None]
    gap: float = 1e-2
    is_exact: bool = False


def _given(table: StageTable) -> StageTable:
    return table


def _coarse(request: PlanningRequest, size: int) -> StageTable:
    """Stages between at most so many positions."""
    return request.coarse(size).stages


def _refined(request: PlanningRequest, pool: Pool) -> StageTable | None:
    """Stages that begin and end about where those of the best plan do."""
    best = pool.best(1)
    if not best or best[0].order:
        return None
    found = request.around(best[0].cuts)
    return found.stages if len(found.positions) < 0.9 * len(request.positions) else None


def _search(
    request: PlanningRequest,
    measure: Measure,
    *,
    max_total_replicas: int | None = None,
    limit_bytes: int | None = None,
) -> tuple[Pool, float]:
    """Plans by one measure, and the bound no plan is below.

    Quick searches over few positions come first: each of their plans is one of the whole problem
    too, and the better the plan known, the fewer stages the exact search has to look at.
    """
    pool = Pool(request.pricer)
    devices = request.devices.limited(limit_bytes)
    best, bound = math.inf, math.inf
    whole, chain = request.searched, request.costs.stages
    quick = [size for size in COARSE_ATOMS if size < 0.6 * chain.num_atoms]
    levels = [Level(partial(_coarse, request, size)) for size in quick]
    if request.band is not None:
        levels.append(Level(partial(_refined, request, pool), gap=1e-3))
    if whole[0] is not chain and not quick:
        levels.append(Level(partial(_given, chain)))
    levels += [Level(partial(_given, table), 0.0, is_exact=True) for table in whole]
    least, gave_up = math.inf, False
    for level in levels:
        costs = level.stages()
        if costs is None:
            continue
        effort = Effort(request.deadline, gap=max(level.gap, request.options.gap))
        bound = math.inf
        for part in search_parts(costs, devices, request.options):
            search = BranchAndBound(
                part.space, measure, effort,
                tied_s=part.tied_s, max_total_replicas=max_total_replicas,
                best_value=best * (1 + 1e-9),
            )  # fmt: skip
            if costs.tied and measure in ("1f1b", "gpipe"):
                search.tied_of = _tied_of(request.pricer, search)
            try:
                search.run(max_searches=2_000 if level.is_exact else 40)
            except DeadlineExceeded:
                gave_up = True
                search.unproven = 0.0
            for path in search.paths:
                pool.add(_assignment(path.arcs, search), path.value)
            best = min([best, *(path.value for path in search.paths)])
            bound = min(bound, search.bound)
        if level.is_exact:
            least = min(least, bound)
        if best < math.inf and request.options.objective not in NOT_STEPS:
            request.tell(best, bound if level.is_exact and request.is_whole else 0.0)
    if not pool.values:
        if effort.is_over or gave_up:
            pool.gave_up = True
            return pool, 0.0
        raise out_of_memory(request)
    if not request.is_whole:
        least = _order_free(request, measure)
    return pool, min(least, best)


def _order_free(request: PlanningRequest, measure: Measure) -> float:
    """A bound for every order of the layers, where not all of them are searched."""
    free = request.order_free
    if free is None:
        return 0.0
    if measure == "throughput":
        return free.throughput_s()
    return free.latency_s() if measure == "latency" else free.step_s()


def _tied_of(pricer: Pricer, search: BranchAndBound) -> Callable[[tuple[StageArc, ...]], float]:
    return lambda arcs: pricer.tied_sync_s(_assignment(arcs, search))


def _assignment(arcs: Sequence[StageArc], search: BranchAndBound) -> Assignment:
    return to_assignment(arcs, search.space.tables, search.space.devices)


def _fastest(request: PlanningRequest, pool: Pool) -> Priced:
    """The smallest simulated step; ties by objective, then fewer stages, then earlier cuts.

    The search's best plans, uniform grids, and small changes to the fastest of them compete.
    """
    pricer = request.pricer
    race = Race(request)
    race.enter(pool.best(MAX_SIMULATED))
    race.enter(steady(request))
    race.enter(uniform_grids(pricer))
    race.enter(pipedream_plans(pricer))
    if pool.gave_up:
        rescue(request, race)
    deepen(race, rounds=0)
    for _ in range(MAX_ROUNDS):
        starts = race.unexplored(MAX_STARTS)
        if not starts or starts[0].num_stages * request.options.num_microbatches > 2**17:
            break
        for start in starts:
            race.enter(_neighbours(request, start))
    deepen(race)
    if race.best is None:
        raise DeadlineExceeded(GAVE_UP) if pool.gave_up else out_of_memory(request)
    return _or_its_baselines(request, race.best)


def _or_its_baselines(request: PlanningRequest, priced: Priced) -> Priced:
    """The plan or a baseline of it that is faster, in the plan's own order of the layers."""
    order = priced.assignment.order
    if not order:
        return take_faster_baseline(request, priced)
    view = request.in_order(order)
    own = view.pricer.price(replace(priced.assignment, order=()))
    best = take_faster_baseline(view, own)
    return priced if best is own else request.pricer.price(replace(best.assignment, order=order))


def _neighbours(request: PlanningRequest, assignment: Assignment) -> Iterator[Assignment]:
    """The same with one cut moved or devices shared out anew, in its own order of the layers."""
    order, own = assignment.order, replace(assignment, order=())
    view = request.in_order(order) if order else request
    if view.costs.has(own.cuts):
        for other in (*move_cuts(own, view.costs), *reshape_stages(own, view.pricer)):
            if view.allows(other):
                yield replace(other, order=order)


def _work_s(request: PlanningRequest) -> float:
    """All work on all devices, or one micro-batch on the fastest: no step is below."""
    whole_s = sum(request.costs.stages.whole_s)
    speeds = [entry.speed for entry in request.cluster.devices]
    shared_s = request.options.num_microbatches * whole_s / sum(speeds)
    return max(shared_s, whole_s / max(speeds)) * (1 - ROUNDING)


def _simulated_bound(request: PlanningRequest, priced: Priced) -> float:
    """No plan's simulated step is below: `docs/planner.md`, the last section."""
    options, fastest = request.options, request.devices.fastest
    forward_s, backward_s = request.costs.stages.whole_s
    if options.objective == "latency":
        return min(forward_s / fastest, priced.step_time_s)
    whole_s = forward_s / fastest + backward_s / fastest
    if request.order_free:
        whole_s = max(whole_s, request.order_free.simulated_s())
    if not request.is_whole or request.band is not None:
        return min(max(whole_s, _work_s(request)), priced.step_time_s)
    effort = Effort(request.deadline, gap=1e-3)
    bound = math.inf
    for part in all_parts(request, request.devices, with_ties=False):
        search = BranchAndBound(
            part.space, "simulated_bound", effort, best_value=priced.step_time_s
        )
        bound = min(bound, search.narrow(1e-3))
    return min(max(bound, whole_s), priced.step_time_s)


MAX_ATOMS = 12
"""Positions of the search."""

MAX_DEVICES = 32
"""Beyond, the search takes long beside the one it is meant to help."""

MAX_SEARCHES = 1
"""Label searches of each part."""

MAX_PLANS = 5
"""The best plans of each part."""


def steady(request: PlanningRequest) -> Iterator[Assignment]:
    """The plans of least time per micro-batch that a search of some ten milliseconds finds.

    The closed form of a step adds up every stage's share of warm-up and drain; where stages have
    different numbers of replicas it can prefer plans that the simulator does not.
    """
    if len(request.cluster.devices) > MAX_DEVICES or request.is_over:
        return
    table = request.coarse(MAX_ATOMS).stages
    effort = Effort(request.deadline, gap=3e-2)
    for part in search_parts(table, request.devices, request.options, with_ties=False):
        search = BranchAndBound(part.space, "throughput", effort)
        try:
            search.run(max_searches=MAX_SEARCHES)
        except DeadlineExceeded:
            return
        for path in sorted(search.paths, key=lambda path: path.value)[:MAX_PLANS]:
            yield to_assignment(path.arcs, table, request.devices)
