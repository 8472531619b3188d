"""A solver's answer: the plan it chose, and bounds that hold for all plans."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..cost.plan_cost import CostedPlan


@dataclass(frozen=True)
class Decision:
    """The chosen plan and the bounds proven for all others.

    Attributes:
        lower_bound: Lower bound on the objective of every plan.
        simulated_bound_s: Lower bound on the simulated step of every plan.
        best_value: Least objective of all plans found; infinite for that of this plan.
    """

    costed: CostedPlan
    lower_bound: float
    simulated_bound_s: float
    best_value: float = math.inf
