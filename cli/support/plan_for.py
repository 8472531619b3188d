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

    from ...core.profile.forward_only import for_inference
    from ...formats.plan_for import apply_rules, plan_for
    from ...formats.runtimes.registry import find_target
    from ...formats.target import find_skipping_value
    from ...planner.choose_options import choose_options
    from ...planner.plan import plan
    from ...schedules.traits import FOLDED

    target = find_target(name)
    if len(profiles) > 1:
        raise InvalidInput("--for takes one profile; choose the micro-batch size first")
    profile = for_inference(profiles[0]) if target.rules.inference else profiles[0]
    schedules = target.rules.schedules
    if find_skipping_value(profile.boundaries):  # which torch cannot carry under a V
        schedules = tuple(name for name in schedules if name not in FOLDED) or schedules
    if "schedule" in options.auto and schedules and not target.rules.inference:
        # A first choice, for the rules to be applied to; the choice below is among all of them.
        options = options.model_copy(update={"schedule": schedules[0]})
    if target.rules.inference:
        auto = tuple(name for name in options.auto if name != "schedule")
        options = options.model_copy(update={"auto": auto})
    ruled = apply_rules(target, profile, options)
    with working(f"planning under the rules of {target.title}"):
        choice = choose_options(profile, cluster, ruled, schedules=schedules)
        chosen: dict[str, object] = {name: getattr(choice.options, name) for name in options.auto}
        settled = options.model_copy(update={**chosen, "auto": ()})
        search = partial(plan, deadline_s=deadline_s)
        found = plan_for(target, profile, cluster, settled, search=search)
        # The micro-batches stay, or two steps of other batches would be compared.
        auto = tuple(name for name in options.auto if name != "num_microbatches")
        free = search(profile, cluster, settled.model_copy(update={"auto": auto})) if auto else None
    prices = [f"{_compare(found.plan, found.free)} the free plan"]
    if free is not None and free.schedule != found.free.schedule:
        prices[0] += " of the same schedule"
        prices.append(f"{_compare(found.plan, free)} the free plan of any, {free.schedule}")
    note = f"under the rules of {target.title}, {', '.join(prices)}"
    return found.plan.model_copy(update={"notes": (note, *choice.reasons, *found.plan.notes)})


def _compare(made: Plan, free: Plan) -> str:
    from ...formats.plan_for import compare_plans

    price = compare_plans(made, free)
    if abs(price) < 5e-4:
        return "as fast as"
    return f"{abs(price):.1%} {'slower' if price > 0 else 'faster'} than"
