"""Check of what a runtime cannot express: refused by name, never silently reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate, chain, groupby, pairwise

from ..core.errors import InvalidInput
from ..core.plan.plan import Plan
from ..core.profile.block_stack import BlockStack
from ..core.units import list_some
from ..schedules.action_order import default_depths
from .gpu_numbers import list_gpus
from .target import (
    FORWARD_SCHEDULES,
    ModelLayers,
    Rejection,
    Target,
    TargetRules,
    count_blocks,
    find_skipping_value,
    find_tied,
    is_for_inference,
)

MOST_NODES = 16
"""Nodes that a message lists."""

MOST_SHOWN = 3
"""Occurrences of one feature that a message lists."""


class Inexpressible(InvalidInput):
    """A plan uses features that a runtime does not have.

    Attributes:
        rejections: Each feature with its reason and remedy.
    """

    rejections: tuple[Rejection, ...]

    def __init__(
        self, target: Target, rejections: tuple[Rejection, ...], *, is_planned: bool = False
    ) -> None:
        self.rejections = rejections
        listed = "; ".join(
            f"{entry.feature}: {entry.reason} ({entry.remedy})" for entry in rejections
        )
        hint = f". To plan under all of its rules: stagewright plan --for {target.name}"
        is_said = (
            is_planned
            or f"--for {target.name}" in listed
            or any(each.is_of_model for each in rejections)
        )
        super().__init__(
            f"{target.title} cannot express this plan. {listed}" + hint * (not is_said)
        )


def check_expressible(plan: Plan, target: Target, *, is_planned: bool = False) -> None:
    """Refuse a plan that a runtime cannot express, which may be planned under its rules already.

    Raises:
        Inexpressible: With every feature that is in the way.
    """
    found = (check(plan, target) for check in CHECKS)
    rejections = (*chain.from_iterable(found), *target.check(plan))
    if rejections:
        raise Inexpressible(target, rejections, is_planned=is_planned)


def _check_schedule(plan: Plan, target: Target) -> Iterator[Rejection]:
    rules, title = target.rules, target.title
    if is_for_inference(plan) and not rules.inference:
        yield Rejection(
            "inference",
            f"the plan is of forward passes alone, and {title} trains",
            f"plan from the profile itself, or with stagewright plan --for {target.name}",
        )
    elif rules.inference and not is_for_inference(plan):
        yield Rejection(
            "training",
            f"the plan is for training ({plan.schedule}), and {title} only runs inference",
            f"stagewright plan --for {target.name} reduces the profile to forward passes",
        )
    # Plans for the latency of one request have an order of work of their own.
    elif plan.schedule not in (
        schedules := rules.schedules or (*FORWARD_SCHEDULES, "forward_only")
    ):
        yield Rejection(
            "schedule",
            f"the plan's schedule is {plan.schedule}, {title} has {', '.join(schedules)}",
            f"schedule={schedules[0]!r}",
        )


def _check_depths(plan: Plan, target: Target) -> Iterator[Rejection]:
    rules, title = target.rules, target.title
    if plan.schedule != "1f1b" or rules.own_depths or rules.inference:
        return
    replicas = [stage.replicas for stage in plan.stages]
    usual = default_depths(plan.num_microbatches, replicas)
    deeper = [index for index, stage in enumerate(plan.stages) if stage.in_flight != usual[index]]
    if deeper:
        first = deeper[0]
        yield Rejection(
            "micro-batches in flight",
            f"stage {first} has {plan.stages[first].in_flight} in flight where 1f1b has "
            f"{usual[first]}, which {title} cannot set",
            "max_extra_in_flight=0",
        )


def _check_replicas(plan: Plan, target: Target) -> Iterator[Rejection]:
    rules, title = target.rules, target.title
    counts = [stage.replicas for stage in plan.stages]
    if rules.replicas == "any" or set(counts) == {1}:
        return
    feature, rule = "unequal replicas", "needs equally many for every stage"
    if rules.replicas == "none":
        feature, rule = "replicas", "has one device a stage"
    if rules.replicas == "none" or len(set(counts)) > 1:
        reason = f"stages have {counts} replicas, and {title} {rule}"
        yield Rejection(feature, reason, "max_replicas=1")
    elif plan.num_microbatches % counts[0]:
        yield Rejection(
            "unequal shares",
            f"{plan.num_microbatches} micro-batches cannot be dealt evenly to {counts[0]} replicas",
            f"num_microbatches as a multiple of {counts[0]}",
        )


def _check_recompute(plan: Plan, target: Target) -> Iterator[Rejection]:
    rules, title = target.rules, target.title
    modes = [stage.recompute for stage in plan.stages]
    if set(modes) == {"never"}:
        return
    if "layers" in modes and "layers" in rules.recompute:
        spans = [span for stage in plan.stages for span in stage.checkpoints]
        if spans != list(pairwise(ModelLayers.of(plan).stack.cuts)):
            yield Rejection(
                "recomputation of some layers",
                f"other layers than each of the blocks recompute, and {title} is told of blocks",
                "recompute='never'",
            )
        return
    if len(set(modes)) > 1 and rules.recompute:
        yield Rejection(
            "recomputation of some stages",
            f"stages recompute {', '.join(sorted(set(modes)))}, and {title} has one way for all",
            "recompute='never' or 'always'",
        )
    elif modes[0] not in rules.recompute:
        stages = [index for index, mode in enumerate(modes) if mode != "never"]
        yield Rejection(
            "recomputation",
            f"stages {list_some(list(map(str, stages)), MOST_SHOWN)} recompute their activations "
            f"{'by layer' if 'layers' in modes else 'as a whole'}, which {title} cannot be told",
            "recompute='never'",
        )


def _check_tied_weights(plan: Plan, target: Target) -> Iterator[Rejection]:
    if target.rules.tied_weights or target.rules.inference:
        return
    tied = find_tied(plan)
    if tied or plan.tied_sync_time_s > 0:
        names = [entry.names[0] for entry in tied] or ["a weight"]
        yield Rejection(
            "tied weights",
            f"stages share {list_some(names, MOST_SHOWN)}, whose gradients they sum; "
            f"{target.title} would train two copies",
            "tied='together'",
        )


def _check_order(plan: Plan, target: Target) -> Iterator[Rejection]:
    if plan.layer_order:
        yield Rejection(
            "order of layers",
            f"the plan reorders branches, and {target.title} runs layers in the model's order",
            "layer_order='given'",
        )


def _check_direct_sends(plan: Plan, target: Target) -> Iterator[Rejection]:
    rules, title = target.rules, target.title
    if plan.direct_sends and not rules.direct_sends:
        send = plan.direct_sends[0]
        yield Rejection(
            "direct sends",
            f"stage {send.source} sends {send.tensors[0]!r} directly to stage {send.target}, and "
            f"{title} only sends to the next stage",
            "skips='relay'",
        )


def _check_chain(plan: Plan, target: Target) -> Iterator[Rejection]:
    """Refuse computation that a list of modules would leave out without a word."""
    rules, title = target.rules, target.title
    if rules.chain and plan.chain_break != "":
        yield explain_chain_break(plan.chain_break, title)
    elif rules.unit == "layer" and (skipping := find_skipping_value(plan.boundaries)):
        yield Rejection(
            "values that skip a stage",
            f"{skipping!r} crosses two cuts, and {title} passes on what the last layer returned",
            "stagewright plan --for torch, which carries it",
        )


def explain_chain_break(chain_break: str | None, title: str) -> Rejection:
    """Return why a model that is no chain of modules, or may be none, cannot be a list of them."""
    if chain_break is None:
        return Rejection(
            "chain of modules not known",
            f"{title} calls a list of modules, each with what the one before returned, and the "
            "profile does not say whether the model is one",
            "profile the model again and plan from that, or use stagewright plan --for torch",
            is_of_model=True,
        )
    return Rejection(
        "no chain of modules",
        f"{chain_break}, and {title} calls a list of modules, each with what the one before "
        "returned",
        "make it a Sequential whose modules hold every operation, or use stagewright plan "
        "--for torch, which traces the model",
        is_of_model=True,
    )


def _check_cuts(plan: Plan, target: Target) -> Iterator[Rejection]:
    rules, title = target.rules, target.title
    cuts = list(accumulate(plan.balance))[:-1]
    yield from _check_calls(plan, title)
    layers = ModelLayers.of(plan)
    if cuts_modules(layers, rules, plan.chain_break):
        for cut in cuts[:MOST_SHOWN]:
            reason = find_module_conflict(plan.layer_names, cut)
            if reason:
                yield Rejection(
                    "cut inside a module",
                    f"{reason}, and {title} cuts in front of modules",
                    f"no_cut_after={plan.layer_names[cut - 1]!r}",
                )
    elif rules.unit == "block":
        try:
            stack = layers.stack
        except InvalidInput as error:
            yield Rejection("no blocks", str(error), "export to one of these", is_of_model=True)
            return
        yield from _check_blocks(plan, cuts, stack, rules, title)


def cuts_modules(layers: ModelLayers, rules: TargetRules, chain_break: str | None) -> bool:
    """Return whether a runtime cuts this model in front of modules."""
    is_free = rules.cuts_chains and chain_break == "" and not layers.has_blocks
    return rules.unit == "module" or is_free


def _check_calls(plan: Plan, title: str) -> Iterator[Rejection]:
    """Refuse modules that two stages call."""
    first: dict[str, int] = {}
    for index, stage in enumerate(plan.stages):
        for name in stage.layer_names:
            module = name.partition("@")[0]
            if first.setdefault(module, index) != index:
                yield Rejection(
                    "a module of two stages",
                    f"stages {first[module]} and {index} call {module!r}, and {title} has each "
                    "module once",
                    f"together='{module},{name}'",
                )
                return


def _check_sharding(plan: Plan, target: Target) -> Iterator[Rejection]:
    shared = [s.strategy for s in plan.stages if s.strategy not in ("single", "replicate")]
    if shared:
        yield Rejection(
            "sharded replicas",
            f"replicas share parameters by {shared[0]}, which an export to {target.title} does "
            "not carry",
            "strategies='replicate'",
        )
    tensor = max(stage.tensor for stage in plan.stages)
    if tensor > 1:
        yield Rejection(
            "split layers",
            f"layers are split over {tensor} devices each, which an export to {target.title} does "
            "not carry",
            "tensor=1",
        )


def _check_devices(plan: Plan, target: Target) -> Iterator[Rejection]:
    rules, title = target.rules, target.title
    nodes = [node for node, _ in list_gpus(plan)]
    runs = [(node, len(list(run))) for node, run in groupby(nodes)]
    if rules.devices == "numbers" and len(runs) > 1:
        yield Rejection(
            "several nodes",
            f"stages are on nodes {runs[0][0]} and {runs[1][0]}, and {title} is one process, with "
            "the GPUs of one node",
            "plan for the devices of one node, or with stagewright plan --for torch",
        )
    elif not plan.ranks or rules.devices in ("numbers", "ranks"):
        return
    elif len(runs) > len({*nodes}):
        yield Rejection(
            "order of nodes",
            f"the pipeline comes back to a node (its devices are on nodes "
            f"{list_some(list(map(str, nodes)), MOST_NODES)}), and {title} counts ranks node by "
            "node",
            "plan for the devices of one node, or give each node's layers its kind by pins",
        )
    elif rules.devices == "equal_nodes" and len({size for _, size in runs}) > 1:
        yield Rejection(
            "unequal nodes",
            f"nodes {[node for node, _ in runs]} have {[size for _, size in runs]} stages, and "
            f"{title} needs equally many",
            "plan for equally many devices of each node, with as many stages",
        )


def _check_blocks(
    plan: Plan, cuts: list[int], stack: BlockStack, rules: TargetRules, title: str
) -> Iterator[Rejection]:
    names = plan.layer_names
    for cut in [cut for cut in cuts if not is_block_cut(cut, stack, rules)][:MOST_SHOWN]:
        where = f"a stage ends behind {names[cut - 1]!r}"
        if stack.is_inside(cut):
            feature = "cut inside a block"
            block = stack.name(stack.count(cut))
            reason = f"{where}, inside block {block!r}, and {title} cuts between blocks"
        else:
            feature = "cut outside the blocks"
            side, end = ("before", "first") if cut <= stack.starts[0] else ("behind", "last")
            reason = f"{where}, {side} the blocks, and {title} keeps that with the {end} one"
        yield Rejection(feature, reason, f"no_cut_after={names[cut - 1]!r}")
    counts = count_blocks(plan)
    if rules.equal_blocks and len(set(counts)) > 1:
        yield Rejection(
            "unequal stages",
            f"stages have {list(counts)} blocks, and {title} needs equally many",
            "stagewright plan --for maxtext, which tries every number of equal stages",
        )


def is_block_cut(cut: int, stack: BlockStack, rules: TargetRules) -> bool:
    """Return whether a runtime that counts blocks can cut at a layer position."""
    if rules.cuts_around_blocks:
        return cut in stack.cuts
    return cut in (stack.cuts[1:] if rules.cuts_behind_blocks else stack.cuts[1:-1])


def find_module_conflict(layer_names: tuple[str, ...], cut: int) -> str:
    """Return why a cut is not in front of a module's first call; empty if it is."""
    name = layer_names[cut]
    if "@" in name:
        return f"the stage behind {layer_names[cut - 1]!r} begins with a later call, {name!r}"
    again = next((other for other in layer_names[cut:] if other.startswith(f"{name}@")), "")
    if again:
        return f"module {name!r} is called again behind the cut, as {again!r}"
    earlier = next(
        (
            other
            for other in layer_names[:cut]
            if f"{other.partition('@')[0]}.".startswith(f"{name}.")
        ),
        "",
    )
    if earlier:
        return f"module {name!r} begins in front of the cut, with {earlier!r}"
    return ""


CHECKS: tuple[Callable[[Plan, Target], Iterator[Rejection]], ...] = (
    _check_schedule,
    _check_depths,
    _check_replicas,
    _check_sharding,
    _check_recompute,
    _check_tied_weights,
    _check_order,
    _check_direct_sends,
    _check_chain,
    _check_cuts,
    _check_devices,
)
