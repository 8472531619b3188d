"""Plan a pipeline: the best contiguous split of a profile over a cluster."""

from __future__ import annotations

import math

from pydantic import ValidationError

from ..core.cluster import Cluster
from ..core.document import invalid_input
from ..core.errors import Infeasible, InvalidInput
from ..core.plan import Plan, PlanOptions
from ..core.profile import Profile
from .build import build_plan
from .cost import StageCosts, stage_costs
from .infeasible import out_of_memory
from .objective import objective_s
from .pipeline import PipelineSearch
from .price import Priced, least_step_time_s, price
from .splits import Cuts, check_cuts, equal_layers, even_times


def plan(
    profile: Profile,
    cluster: Cluster | str,
    options: PlanOptions | None = None,
    *,
    num_microbatches: int | None = None,
) -> Plan:
    """The fastest contiguous split whose stages fit their devices; stage s runs on device s.

    For every number of stages the split with the smallest objective (see `objective`) is found
    exactly; it competes in the simulator with equal layer counts and even times. The fastest
    wins, so a plan is never slower, as simulated, than equal layer counts on as many or fewer
    devices that the schedule takes (1F1B: at most as many stages as micro-batches, as torch has
    it). `Plan.proof` compares its objective with a bound that holds for every allowed split.
    About O(L^2 S) for each of some ten to a hundred dynamic programs per number of stages S.
    The same inputs give the same plan, bit for bit.

    Args:
        profile: Costs of L layers for one micro-batch.
        cluster: At most as many stages as it has devices; or its shorthand, such as ``4x24GB``.
        options: What is asked for; the defaults of `PlanOptions` if not given.
        num_microbatches: Replaces the options' number.

    Raises:
        InvalidInput: An option or the profile's numbers are out of range, or exactly more 1F1B
            stages are asked for than micro-batches.
        Infeasible: No split fits; the message names the constraint and the ways out.
    """
    if isinstance(cluster, str):
        cluster = Cluster.parse(cluster)
    costs = stage_costs(profile, cluster, _options(options, num_microbatches))
    search = PipelineSearch(costs)
    pool: set[Cuts] = set()
    lower_bound_s = math.inf
    for num_stages in search.stage_counts():
        found = search.best_split(num_stages)
        if found.cuts is None:
            continue
        lower_bound_s = min(lower_bound_s, found.lower_bound_s)
        pool.add(found.cuts)
        for cuts in (equal_layers(costs.num_layers, num_stages), even_times(costs, num_stages)):
            if _is_allowed(costs, cuts):
                pool.add(cuts)
    if not pool:
        raise out_of_memory(search)
    return build_plan(costs, _fastest(costs, pool), lower_bound_s)


def _options(options: PlanOptions | None, num_microbatches: int | None) -> PlanOptions:
    options = options or PlanOptions()
    if num_microbatches is None:
        return options
    try:
        return PlanOptions.model_validate(
            {**options.model_dump(), "num_microbatches": num_microbatches}
        )
    except ValidationError as error:
        raise invalid_input(error, "plan options") from None


def _is_allowed(costs: StageCosts, cuts: Cuts) -> bool:
    try:
        check_cuts(costs, cuts)
    except (Infeasible, InvalidInput):
        return False
    return True


def _fastest(costs: StageCosts, pool: set[Cuts]) -> Priced:
    """The smallest simulated step; ties by objective, then fewer stages, then earlier cuts.

    Splits are simulated from the smallest objective on, and not at all where their bound already
    exceeds the fastest found.
    """
    best: Priced | None = None
    order = sorted(pool, key=lambda cuts: (objective_s(costs, cuts), len(cuts), cuts))
    for cuts in order:
        if best and least_step_time_s(costs, cuts) > best.step_time_s * (1 + 1e-9):
            continue
        priced = price(costs, cuts)
        if best is None or priced.step_time_s < best.step_time_s:
            best = priced
    assert best is not None, "the pool is not empty"
    return best
