"""Exact search by a closed form, in stages from coarse to whole, and the plans that it finds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from ...core.errors import DeadlineExceeded
from ..cost.assignment import Assignment
from ..cost.chain import StageTable
from ..cost.device_classes import Devices
from ..cost.plan_cost import CostedPlan, CostModel
from ..cost.work_limits import WorkLimits
from ..problem.constraints import search_parts
from ..problem.problem import PlanningRequest, all_parts
from ..problem.regular import get_rule
from ..search.arcs import Measure, StageArc, to_assignment
from ..search.branch_and_bound import ROUNDING, BranchAndBound, Effort
from .feasibility import infeasible_error

COARSE_ATOMS = (32, 96, 300)
"""Positions of the quick searches whose plans start the exact one."""

REFINING_STEPS = (8, 2)
"""Distances, in positions, between the cuts that refining a plan tries.

A stage of a long chain is a hundred layers: near the cuts of a coarse plan alone, that plan is the
best there is.
"""

NEAR = 0.08
"""Relative distance from the best objective within which plans are simulated."""

NOT_STEPS = ("memory", "devices")
"""Objectives whose plans are searched by another measure than they are compared by."""

MEASURES: dict[str, Measure] = {"1f1b": "1f1b", "gpipe": "gpipe"}
"""Measures of the schedules whose step the search minimises itself."""


@dataclass
class PlanPool:
    """Plans found so far, with the value that the search gave them.

    Attributes:
        gave_up: True if the search ended without a plan and without a proof that there is none.
        is_whole: True if all plans were searched.
    """

    cost_model: CostModel
    values: dict[Assignment, float] = field(default_factory=dict)
    gave_up: bool = False
    is_whole: bool = False

    def add(self, assignment: Assignment, value: float) -> None:
        self.values[assignment] = min(value, self.values.get(assignment, math.inf))

    def leader(self) -> Assignment:
        """Return the best plan."""
        best = min(self.values, key=lambda entry: (self.values[entry], entry))
        return round_up_replicas(best, self.cost_model)

    def best(self, most: int) -> list[Assignment]:
        """Return the best plans and the best of each number of stages, if near the best of all."""
        order = sorted(self.values, key=lambda entry: (self.values[entry], entry))
        if not order:
            return []
        limit = self.values[order[0]] * (1 + NEAR)
        of_count: dict[int, Assignment] = {}
        for entry in order:
            of_count.setdefault(entry.num_stages, entry)
        chosen = dict.fromkeys([*order[:most], *of_count.values()])
        near = [entry for entry in chosen if self.values[entry] <= limit]
        return list(dict.fromkeys(round_up_replicas(entry, self.cost_model) for entry in near))


@dataclass(frozen=True)
class SearchLevel:
    """One search of a request; levels go from quick to exact.

    It ends at a relative gap; its stages are `None` if there is nothing to search, and if it is
    exact, they make up all plans, or all of the orders searched. With ``only_better``
    some are left out that no plan has which is better than the best known then. Refining ends at
    the level's gap even where a larger one is asked for.
    """

    stages: Callable[[], StageTable | None]
    gap: float = 1e-2
    is_exact: bool = False
    is_fallback: bool = False
    only_better: bool = False
    is_refining: bool = False


def search_in_stages(
    request: PlanningRequest,
    measure: Measure,
    *,
    max_total_replicas: int | None = None,
    limit_bytes: int | None = None,
) -> tuple[PlanPool, float]:
    """Return plans found by one measure, and a lower bound on it for all plans.

    Quick searches over few positions come first: their plans are plans of the whole problem, too,
    and the better the best known plan, the fewer stages the exact search has to look at.
    """
    pool = PlanPool(request.cost_model)
    devices = request.devices.cap_memory(limit_bytes)
    effort = Effort(request.deadline)
    best, least, gave_up = math.inf, math.inf, False
    tells = request.options.objective not in NOT_STEPS
    bounds_objective = request.options.objective != "step_time"
    pool.is_whole = request.is_whole
    for level in _list_levels(request, pool, measure):
        if level.is_fallback and pool.is_whole:
            continue
        stages = level.stages()
        if stages is None:
            continue
        gap = level.gap if level.is_refining else max(level.gap, request.options.gap)
        effort = Effort(request.deadline, gap=gap)
        pool.is_whole |= level.only_better
        # Plans with a stage that is left out are no better than the best so far.
        bound = best if level.only_better else math.inf
        for part in search_parts(stages, devices, request.options):
            search = BranchAndBound(
                part.space, measure, effort, tied_s=part.tied_s,
                max_total_replicas=max_total_replicas, best_value=best * (1 + 1e-9),
            )  # fmt: skip
            if stages.tied and measure in ("1f1b", "gpipe"):
                # The part's `tied_s` is a bound; a plan's value has the time of its placement.
                search.tied_of = partial(_tied_sync_s, request.cost_model, stages, devices)
            try:
                if level.is_refining:
                    search.lower_metric(level.gap)
                else:
                    search.run(max_searches=2_000 if level.is_exact else 40)
            except DeadlineExceeded:
                gave_up = True
                search.unproven = 0.0
            best = min(best, _add_plans(request, pool, search, stages, devices))
            bound = min(bound, search.bound)
        if level.is_exact:
            least = min(least, bound)
        if pool.values and request.progress and tells:
            is_bound = bounds_objective and level.is_exact and pool.is_whole
            leader = pool.leader()
            request.tell(request.cost_model.evaluate(leader), bound if is_bound else 0.0)
    if not pool.values:
        if effort.is_over or gave_up:
            pool.gave_up = True
            return pool, 0.0
        raise infeasible_error(request)
    if not pool.is_whole:
        least = _bound_all_orders(request, measure)
    return pool, min(least, best)


def _add_plans(
    request: PlanningRequest,
    pool: PlanPool,
    search: BranchAndBound,
    stages: StageTable,
    devices: Devices,
) -> float:
    """Add the plans of a search to the pool; return the least of their values."""
    best = math.inf
    for path in search.paths:
        found, value = to_assignment(path.arcs, stages, devices), path.value
        if request.cluster.links:
            # The search takes the fastest link of each level: a bound, but no plan's value.
            value = request.cost_model.evaluate(found).value
        pool.add(found, value)
        best = min(best, value)
    return best


def _list_levels(
    request: PlanningRequest, pool: PlanPool, measure: Measure
) -> Iterator[SearchLevel]:
    whole, chain = request.searched, request.costs.stages
    quick = [size for size in COARSE_ATOMS if size < 0.6 * chain.num_atoms]
    yield from (SearchLevel(partial(_coarsen, request, size)) for size in quick)
    if whole[0] is not chain and not quick:
        yield SearchLevel(partial(_same, chain))
    if request.branches is not None and not request.is_whole:
        yield from (SearchLevel(partial(_same, table)) for table in whole)
    if request.band is not None or (request.branches is None and not request.is_whole):
        for step in REFINING_STEPS:
            refine = partial(_refine, request, pool, step)
            yield SearchLevel(refine, gap=1e-3 * step, is_refining=True)
    if not request.is_whole:
        better = partial(_list_better, request, pool, measure)
        yield SearchLevel(better, 0.0, is_exact=True, only_better=True)
    # Several tables (of several orders) are exact together: the least of their bounds holds.
    for table in whole:
        yield SearchLevel(
            partial(_same, table), 0.0, is_exact=True, is_fallback=not request.is_whole
        )


def _list_better(request: PlanningRequest, pool: PlanPool, measure: Measure) -> StageTable | None:
    """Return the stages that a plan better than the best one known may have, if not too many."""
    limits = None if request.is_over else _limit_work(request, pool, measure)
    return None if limits is None else request.within(limits)


def _limit_work(request: PlanningRequest, pool: PlanPool, measure: Measure) -> WorkLimits | None:
    """Return the most work of a stage in a plan better than the best one known, by replicas.

    A step takes at least one micro-batch's passage, and what any stage does besides: its other
    micro-batches. Throughput is at least that of any stage.
    """
    if not pool.values or measure == "latency":
        return None
    options, devices = request.options, request.devices
    num_devices = len(request.cluster.devices)
    most = max(len(entry) for entry in devices.classes)
    most = min(most, options.max_replicas or most, options.num_microbatches)
    whole_s, best = sum(request.costs.stages.whole_s), min(pool.values.values())
    replicas = np.arange(1, most + 1)
    if measure == "throughput":
        of_stage = (best * devices.fastest * replicas).astype(np.float64)
    else:
        rounds = -(-options.num_microbatches // replicas) - 1
        spare_s = best * devices.fastest - whole_s
        of_stage = np.where(rounds > 0, spare_s / np.maximum(rounds, 1), whole_s)
    return WorkLimits.of(of_stage, num_devices, whole_s)


def _same(table: StageTable) -> StageTable:
    return table


def _coarsen(request: PlanningRequest, size: int) -> StageTable:
    return request.coarse(size).stages


def _refine(request: PlanningRequest, pool: PlanPool, step: int) -> StageTable | None:
    """Return the stages that begin and end at the cuts of the best plan, or some steps from it."""
    best = pool.best(1)
    if not best or best[0].order:
        return None
    found = request.around(best[0].cuts, step)
    return found.stages if len(found.positions) < 0.9 * len(request.positions) else None


def _tied_sync_s(
    cost_model: CostModel, stages: StageTable, devices: Devices, arcs: Sequence[StageArc]
) -> float:
    return cost_model.tied_sync_s(to_assignment(arcs, stages, devices))


def _bound_all_orders(request: PlanningRequest, measure: Measure) -> float:
    """Return a bound for every order of the layers if only some are searched."""
    free = request.order_free
    if free is None:
        return 0.0
    if measure == "throughput":
        return free.throughput_s()
    return free.latency_s() if measure == "latency" else free.step_s()


def bound_work_s(request: PlanningRequest) -> float:
    """Return a bound on every step: all work shared, or one micro-batch on the fastest device."""
    whole_s = sum(request.costs.stages.whole_s)
    speeds = [entry.speed for entry in request.cluster.devices]
    shared_s = request.options.num_microbatches * whole_s / sum(speeds)
    return max(shared_s, whole_s / max(speeds)) * (1 - ROUNDING)


def bound_simulated_step(request: PlanningRequest, costed: CostedPlan) -> float:
    """Return a lower bound on every plan's simulated step (see `docs/concepts/planner.md`)."""
    options, fastest = request.options, request.devices.fastest
    forward_s, backward_s = request.costs.stages.whole_s
    if options.objective == "latency":
        return min(forward_s / fastest, costed.step_time_s)
    whole_s = forward_s / fastest + backward_s / fastest
    if request.order_free:
        whole_s = max(whole_s, request.order_free.simulated_s())
    if not request.is_whole or request.band is not None:
        return min(max(whole_s, bound_work_s(request)), costed.step_time_s)
    effort = Effort(request.deadline, gap=1e-3)
    bound = math.inf
    for part in all_parts(request, request.devices, with_ties=False):
        search = BranchAndBound(
            part.space, "simulated_bound", effort, best_value=costed.step_time_s
        )
        try:
            bound = min(bound, search.narrow(1e-3))
        except DeadlineExceeded:
            bound = 0.0
    return min(max(bound, whole_s), costed.step_time_s)


def round_up_replicas(assignment: Assignment, cost_model: CostModel) -> Assignment:
    """Return the assignment with each class's last stage on whole groups, if that costs nothing.

    No other stage may use the rest of a group that a last stage has a part of, and gradients are
    summed over as many groups either way. The search stops at the fewest replicas that suffice,
    which rarely share a divisor with those of other stages; whole groups do, and the simulator
    then simulates one of that many equal pipelines (`simulate.step_time`). A grid stays one.
    """
    if get_rule(cost_model.options) != "no":
        return assignment
    last: dict[int, int] = {}
    for stage in sorted(range(assignment.num_stages), key=assignment.ends.__getitem__):
        last[assignment.classes[stage]] = stage
    replicas, ends = list(assignment.replicas), list(assignment.ends)
    for stage in last.values():
        more = _missing_replicas(assignment, stage, cost_model)
        replicas[stage] += more
        ends[stage] += more
    if replicas == list(assignment.replicas):
        return assignment
    found = replace(assignment, replicas=tuple(replicas), ends=tuple(ends))
    return found if _is_as_good(found, assignment, cost_model) else assignment


def _missing_replicas(assignment: Assignment, stage: int, cost_model: CostModel) -> int:
    """Return the replicas that a stage lacks to fill whole groups; 0 if they cannot be added."""
    entry = cost_model.devices.classes[assignment.classes[stage]]
    count, end = assignment.replicas[stage], assignment.ends[stage]
    size = max((size for size in entry.group_sizes[:-1] if size < count), default=1)
    more = -count % size
    most = min(cost_model.options.max_replicas or len(entry), cost_model.num_microbatches)
    if count + more > most or end + more > len(entry):
        return 0
    return more if entry.place(end + more, count + more, is_last=True) == end + more else 0


def _is_as_good(found: Assignment, before: Assignment, cost_model: CostModel) -> bool:
    """Return True if a plan fits and neither objective nor closed form of the step is worse."""
    stages, old = cost_model.stages(found), cost_model.stages(before)
    if not cost_model.fits(stages, found):
        return False
    tied_s = cost_model.tied_sync_s(before)
    is_slower = cost_model.model_s(stages, tied_s) > cost_model.model_s(old, tied_s) * (
        1 + ROUNDING
    )
    value, limit = cost_model.value(found, stages, tied_s), cost_model.value(before, old, tied_s)
    return not is_slower and value <= limit * (1 + ROUNDING)
