"""Price a split somebody chose, with the same checks as a planned one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..core.cluster import Cluster
from ..core.errors import InvalidInput
from ..core.plan import Plan, PlanOptions
from ..core.profile import Profile
from .build import build_plan
from .cost import stage_costs
from .pipeline import PipelineSearch
from .price import price
from .splits import check_cuts, cuts_of


def plan_from_balance(
    profile: Profile, cluster: Cluster, options: PlanOptions | None, balance: Sequence[int]
) -> Plan:
    """The plan with these layer counts; stage s runs on device s.

    The proof's bound is a quick one (two dynamic programs for each number of stages), so a split
    that is best may still be called feasible.

    Raises:
        InvalidInput: The counts do not cover the layers, a cut is not legal, or a 1F1B balance
            has more stages than there are micro-batches.
        Infeasible: A stage exceeds its device's memory, or there are more stages than devices.
    """
    costs = stage_costs(profile, cluster, options or PlanOptions())
    wanted = costs.options.num_stages
    if wanted is not None and wanted != len(balance):
        raise InvalidInput(
            f"the balance has {len(balance)} stages but the options ask for {wanted}",
            field="/balance",
        )
    cuts = cuts_of(balance)
    check_cuts(costs, cuts)
    search = PipelineSearch(costs)
    lower_bound_s = math.inf
    for num_stages in search.stage_counts():
        found = search.best_split(num_stages, exact=False)
        lower_bound_s = min(lower_bound_s, found.lower_bound_s)
    return build_plan(costs, price(costs, cuts), lower_bound_s)
