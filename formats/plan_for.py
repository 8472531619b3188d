"""Plans under the rules of another runtime, so that an export never fails after the fact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from ..core.cluster.cluster import Cluster
from ..core.errors import Infeasible, InvalidInput
from ..core.plan.plan import Plan, PlanOptions, Remedy
from ..core.profile.forward_only import for_serving
from ..core.profile.module_chain import find_chain_break
from ..core.profile.profile import Profile
from ..planner.choose_options import ChosenOptions, choose_options
from ..planner.heuristics.candidates import FORBIDDEN
from ..planner.plan import plan
from ..planner.problem.input_checks import parse_cluster, require_options, require_profile
from ..planner.problem.layer_checkpoints import list_checkpoints, may_checkpoint
from ..planner.remedies import keep_remedies
from ..schedules.traits import FOLDED
from .expressible import (
    check_expressible,
    cuts_modules,
    explain_chain_break,
    find_module_conflict,
    is_block_cut,
)
from .runtimes.registry import find_target
from .target import (
    FORWARD_SCHEDULES,
    ModelLayers,
    Target,
    TargetRules,
    count_ranks,
    find_skipping_value,
)

SAME = 5e-4
"""Relative difference of two steps that are called as fast as each other."""

Search = Callable[[Profile, Cluster, PlanOptions], Plan]
"""Finds the best plan; `planner.plan.plan`, perhaps with a deadline."""


@dataclass(frozen=True)
class TargetPlan:
    """The best plan under a runtime's rules, and the best ones without them.

    Attributes:
        plan: It can be exported to the runtime; its first note says what the rules cost.
        free: The best plan of the same schedule for our own runtime.
        unrestricted: The best plan of any schedule, if the options leave it open; else ``free``.
    """

    plan: Plan
    free: Plan
    unrestricted: Plan

    @property
    def price(self) -> float:
        """Return by how much the objective, such as the step, is above that without the rules."""
        return compare_plans(self.plan, self.free)


def plan_for(
    target: Target | str,
    profile: Profile,
    cluster: Cluster | str,
    options: PlanOptions | None = None,
    *,
    search: Search = plan,
) -> TargetPlan:
    """Return the best plan that a runtime can express, and what its rules cost.

    The proof of the plan is of the target's rules: its bound holds for all plans that keep them.

    Args:
        target: The runtime, or its name.
        profile: Costs of the layers; reduced to forward passes for a runtime without training.
        cluster: Devices and links, or shorthand.
        options: Further options, which have to be within the target's rules; those that are
            ``auto`` are chosen among what it has.
        search: Finds the best plan under options.

    Raises:
        InvalidInput: An option contradicts the target's rules, or the model is not what its form
            needs: a stack of blocks, or a chain of modules.
        Inexpressible: The schedule asked for does not go with the model in this runtime.
        Infeasible: No plan within the rules fits.
    """
    cluster, asked = parse_cluster(cluster), require_options(options)
    target, profile = find_target(target), require_profile(profile)
    if target.rules.inference:
        profile = for_serving(profile, last_position=target.rules.last_position)
    choice = _choose_options(target, profile, cluster, asked)
    best = _search_within(target, profile, cluster, choice.options, search)
    for alternative in _list_alternatives(target, asked, choice, best):
        if not target.check(best):
            break
        choice = alternative
        best = _search_within(target, profile, cluster, choice.options, search)
    check_expressible(best, target, is_planned=True)
    settled = choice.options
    free = unrestricted = search(profile, cluster, settled)
    # The micro-batches stay, or steps of different batches would be compared.
    auto = tuple(name for name in asked.auto if name != "num_microbatches")
    if "schedule" in auto and not target.rules.inference:
        unrestricted = search(profile, cluster, settled.model_copy(update={"auto": auto}))
    note = _describe_price(target, best, free, unrestricted)
    best = best.model_copy(update={"notes": (note, *choice.reasons, *best.notes)})
    return TargetPlan(best, free, unrestricted)


def _search_within(
    target: Target, profile: Profile, cluster: Cluster, options: PlanOptions, search: Search
) -> Plan:
    found: list[Plan] = []
    failures: list[Infeasible] = []
    for candidate in _uniform_recompute(target, profile, options):
        try:
            found.append(search(profile, cluster, candidate))
        except Infeasible as error:
            keeps = partial(_keeps_rules, target, profile, candidate)
            failures.append(keep_remedies(error, candidate, keeps))
    if not found:
        raise failures[-1]
    return _name_rules(min(found, key=measure_objective), target)


def _keeps_rules(target: Target, profile: Profile, asked: PlanOptions, remedy: Remedy) -> bool:
    """Return whether the target allows what a remedy changes."""
    if target.rules.inference and remedy.options.schedule != asked.schedule:
        return False
    if remedy.options.recompute == "auto" and "always" not in target.rules.recompute:
        return False  # what fits is a plan whose stages recompute as a whole
    try:
        return apply_rules(target, profile, remedy.options) == remedy.options
    except InvalidInput:
        return False


def _list_alternatives(
    target: Target, asked: PlanOptions, choice: ChosenOptions, made: Plan
) -> Iterator[ChosenOptions]:
    """Yield further choices of what is ``auto``, for a plan that the target itself refuses."""
    refused = target.check(made)
    if not refused:
        return
    ranks = count_ranks(made) * made.stages[0].replicas
    count = -(-made.num_microbatches // ranks) * ranks
    first = target.rules.schedules[:1]
    if "num_microbatches" in asked.auto and asked.batch_size is None:
        reason = f"{count} micro-batches chosen: a multiple of {ranks}, for {target.title}"
        options = choice.options.model_copy(update={"num_microbatches": count})
        yield ChosenOptions(options, (reason, *choice.reasons[1:]))
    if "schedule" in asked.auto and first and choice.options.schedule not in first:
        reason = f"schedule {first[0]} chosen: {refused[0].reason}"
        update = {"schedule": first[0], "chunks": PlanOptions().chunks}
        yield ChosenOptions(choice.options.model_copy(update=update), (reason,))


def _choose_options(
    target: Target, profile: Profile, cluster: Cluster, asked: PlanOptions
) -> ChosenOptions:
    """Choose what is ``auto`` among what the target has; its rules are not in the result."""
    schedules, auto, first = target.rules.schedules, asked.auto, asked
    if find_skipping_value(profile.boundaries):  # which torch cannot carry under a V
        schedules = tuple(name for name in schedules if name not in FOLDED) or schedules
    if target.rules.inference:
        auto = tuple(name for name in auto if name != "schedule")
    elif "schedule" in auto:
        # A first choice, for the rules to be applied to; the choice below is among all of them.
        first = asked.model_copy(update={"schedule": schedules[0]})
    ruled = apply_rules(target, profile, first.model_copy(update={"auto": auto}))
    choice = choose_options(profile, cluster, ruled, schedules=schedules)
    chosen: dict[str, object] = {name: getattr(choice.options, name) for name in auto}
    if "schedule" in auto and chosen["schedule"] not in schedules:
        chosen["schedule"] = first.schedule  # nothing was found to fit, so nothing was chosen
    return ChosenOptions(first.model_copy(update={**chosen, "auto": ()}), choice.reasons)


def _describe_price(target: Target, made: Plan, free: Plan, unrestricted: Plan) -> str:
    def compare(other: Plan) -> str:
        price = compare_plans(made, other)
        if abs(price) < SAME:
            return "as fast as"
        return f"{abs(price):.1%} {'slower' if price > 0 else 'faster'} than"

    prices = f"{compare(free)} the free plan"
    if unrestricted.schedule != free.schedule:
        prices += (
            f" of the same schedule, {compare(unrestricted)} the free plan of any, "
            f"{unrestricted.schedule}"
        )
    return f"under the rules of {target.title}, {prices}"


def _name_rules(made: Plan, target: Target) -> Plan:
    """Return the plan with baselines refused by the target's rules, which its options hold."""
    baselines = tuple(
        each.model_copy(
            update={"reason": each.reason.replace(FORBIDDEN, f"{target.title} cannot cut there")}
        )
        for each in made.baselines
    )
    return made.model_copy(update={"baselines": baselines})


def compare_plans(made: Plan, free: Plan) -> float:
    """Return by how much a plan's objective is above another's, as a fraction."""
    least = measure_objective(free)
    return measure_objective(made) / least - 1 if least else 0.0


def measure_objective(made: Plan) -> float:
    """Return what a plan was to minimise; for ``step_time`` the simulated step."""
    return made.step_time_s if made.options.objective == "step_time" else made.proof.value


def apply_rules(target: Target, profile: Profile, options: PlanOptions) -> PlanOptions:
    """Return the options with the target's rules as constraints.

    Raises:
        InvalidInput: An option contradicts a rule.
    """
    rules, title = target.rules, target.title

    def refuse(field: str, what: str) -> InvalidInput:
        return InvalidInput(f"{title} {what}", field=f"/options/{field}")

    if rules.chain and (chain_break := find_chain_break(profile)) != "":
        found = explain_chain_break(chain_break, title)
        raise InvalidInput(f"{found.reason}; {found.remedy}")
    schedules = rules.schedules or FORWARD_SCHEDULES
    if options.schedule not in schedules:
        what = f"has no schedule {options.schedule}" + " of forward passes" * rules.inference
        raise refuse("schedule", f"{what}; choose {' or '.join(schedules)}")
    if options.max_replicas != 1 and rules.replicas == "none":
        raise refuse("max_replicas", "has one device a stage; leave max_replicas=1")
    if options.tensor != 1:
        raise refuse("tensor", "is not told of split layers here; set tensor=1")
    if options.strategies != ("replicate",):
        raise refuse("strategies", "shares parameters by itself; leave strategies out")
    if options.layer_order != "given":
        raise refuse("layer_order", "runs layers in the model's order; set layer_order='given'")
    if options.skips != "relay" and not rules.direct_sends:
        raise refuse("skips", "only sends to the next stage; set skips='relay'")
    if options.max_extra_in_flight and not rules.own_depths:
        raise refuse("max_extra_in_flight", "has 1f1b's own warm-up; set max_extra_in_flight=0")
    if options.recompute == "always" and "always" not in rules.recompute:
        raise refuse("recompute", "cannot recompute whole stages; set recompute='never'")
    if options.recompute == "layers" and "layers" not in rules.recompute:
        raise refuse("recompute", "is not told which layers recompute; set recompute='never'")
    if options.recompute == "layers" and not _may_recompute_blocks(profile):
        what = "recomputes whole blocks, and here other layers would; set recompute='never'"
        raise refuse("recompute", what)
    update: dict[str, object] = {}
    if options.recompute == "auto" and not rules.recompute:
        update["recompute"] = "never"
    if not (rules.tied_weights or rules.inference):
        update["tied"] = "together"
    if rules.replicas == "equal" and options.max_replicas != 1:
        update |= {"regular": "grid", "regular_within": None}
    if rules.equal_blocks:
        update |= {"regular": "equal_blocks", "regular_within": None}
    forbidden = dict.fromkeys((*options.no_cut_after, *forbidden_cuts(profile, rules)))
    update["no_cut_after"] = tuple(forbidden)
    update["together"] = tuple(dict.fromkeys((*options.together, *join_calls(profile))))
    return PlanOptions.model_validate(options.model_copy(update=update).model_dump())


def join_calls(profile: Profile) -> Iterator[tuple[str, str]]:
    """Yield the first and last call of each module that is called several times."""
    calls: dict[str, list[str]] = {}
    for entry in profile.layers:
        calls.setdefault(entry.layer.name.partition("@")[0], []).append(entry.layer.name)
    for names in calls.values():
        if len(names) > 1:
            yield names[0], names[-1]


def forbidden_cuts(profile: Profile, rules: TargetRules) -> Iterator[str]:
    """Yield the layers behind which a target cannot cut.

    Raises:
        InvalidInput: The target counts blocks, and the model has no single stack of them.
    """
    layers = ModelLayers.of(profile)
    names, by_modules = layers.names, cuts_modules(layers, rules, find_chain_break(profile))
    stack = layers.stack if rules.unit == "block" and not by_modules else None
    for cut in range(1, len(names)):
        is_inside = stack is not None and not is_block_cut(cut, stack, rules)
        if is_inside or (by_modules and find_module_conflict(names, cut)):
            yield names[cut - 1]


def _may_recompute_blocks(profile: Profile) -> bool:
    """Return True if the layers that would be activation checkpoints are the model's blocks."""
    layers = ModelLayers.of(profile)
    return layers.has_blocks and list_checkpoints(profile) == tuple(pairwise(layers.stack.cuts))


def _uniform_recompute(
    target: Target, profile: Profile, options: PlanOptions
) -> Iterator[PlanOptions]:
    """Yield the options under the target's rules, with one way to recompute for all stages."""
    rules, options = target.rules, apply_rules(target, profile, options)
    if options.recompute != "auto":
        yield options
        return
    yield options.model_copy(update={"recompute": "never"})
    if "always" in rules.recompute:
        yield options.model_copy(update={"recompute": "always"})
    if "layers" in rules.recompute and may_checkpoint(options) and _may_recompute_blocks(profile):
        yield options.model_copy(update={"recompute": "layers"})
