"""Plans of ``stagewright plan --for TARGET``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...core.errors import InvalidInput
from .progress import working

if TYPE_CHECKING:
    from ...core.cluster.cluster import Cluster
    from ...core.plan.plan import Plan, PlanOptions
    from ...core.profile.profile import Profile


def make_plan_for(
    name: str,
    profiles: Sequence[Profile],
    cluster: Cluster,
    options: PlanOptions,
    *,
    deadline_s: float | None,
) -> Plan:
    """Plan under a target's rules; a note says what they cost.

    Raises:
        InvalidInput: An option contradicts the rules, or there are several profiles.
        Infeasible: No plan within the rules fits.
    """
    from functools import partial

    from ...formats.plan_for import plan_for
    from ...formats.runtimes.registry import find_target
    from ...planner.plan import plan

    target = find_target(name)
    if len(profiles) > 1:
        raise InvalidInput("--for takes one profile; choose the micro-batch size first")
    search = partial(plan, deadline_s=deadline_s)
    with working(f"planning under the rules of {target.title}"):
        return plan_for(target, profiles[0], cluster, options, search=search).plan
