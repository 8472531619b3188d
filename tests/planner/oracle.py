"""Every split there is, and whether it may be used: the oracle of the planner's tests."""

from collections.abc import Iterator
from itertools import combinations

from stagewright.core.errors import Infeasible, InvalidInput
from stagewright.planner.cost import StageCosts
from stagewright.planner.objective import objective_s
from stagewright.planner.splits import Cuts, check_cuts


def usable_splits(costs: StageCosts, num_stages: int) -> Iterator[Cuts]:
    """All splits into that many stages that are legal, fit and that torch's schedule takes."""
    options = costs.options
    if options.schedule == "1f1b" and options.num_microbatches < num_stages:
        return
    for inner in combinations(range(1, costs.num_layers), num_stages - 1):
        cuts = (0, *inner, costs.num_layers)
        try:
            check_cuts(costs, cuts)
        except (Infeasible, InvalidInput):
            continue
        yield cuts


def least_objective_s(costs: StageCosts, num_stages: int) -> float | None:
    """The smallest objective of any usable split."""
    return min(
        (objective_s(costs, cuts) for cuts in usable_splits(costs, num_stages)), default=None
    )
