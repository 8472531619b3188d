"""Check of what a runtime cannot express: refused by name, never silently reduced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate, chain

from ..core.errors import InvalidInput
from ..core.plan.plan import Plan
from ..core.profile.block_stack import BlockStack, find_stack
from ..schedules.action_order import default_depths
from .target import Refusal, Target, TargetRules, count_blocks, find_skipping_value

MOST_SHOWN = 3
"""Occurrences of one feature that a message lists."""


class Inexpressible(InvalidInput):
    """A plan uses features that a runtime does not have.

    Attributes:
        refusals: Each feature with its reason and remedy.
    """

    def __init__(self, target: Target, refusals: tuple[Refusal, ...]) -> None:
        self.refusals = refusals
        listed = "; ".join(
            f"{entry.feature}: {entry.reason} ({entry.remedy})" for entry in refusals
        )
        super().__init__(
            f"{target.title} cannot express this plan. {listed}. "
            f"To plan under all of its rules: --for {target.name}"
        )


def check_expressible(plan: Plan, target: Target) -> None:
    """Refuse a plan that a runtime cannot express.

    Raises:
        Inexpressible: With every feature that is in the way.
    """
    found = (check(plan, target.rules, target.title) for check in CHECKS)
    refusals = (*chain.from_iterable(found), *target.check(plan))
    if refusals:
        raise Inexpressible(target, refusals)


def _check_schedule(plan: Plan, rules: TargetRules, title: str) -> Iterator[Refusal]:
    if is_for_inference(plan):
        if not rules.inference:
            yield Refusal(
                "inference",
                f"the plan is of a forward-only profile, and {title} trains",
                "plan the profile itself instead of for_inference(profile)",
            )
    elif rules.inference:
        yield Refusal(
            "training",
            f"the plan is for training ({plan.schedule}), and {title} only runs inference",
            "plan for_inference(profile)",
        )
    elif plan.schedule not in rules.schedules:
        yield Refusal(
            "schedule",
            f"the plan's schedule is {plan.schedule}, {title} has {', '.join(rules.schedules)}",
            f"--schedule {rules.schedules[0]}",
        )


def is_for_inference(plan: Plan) -> bool:
    """Return whether a plan was made from a forward-only profile."""
    return not any(
        stage.backward_time_s or stage.send_backward_bytes or stage.memory.gradients_bytes
        for stage in plan.stages
    )


def _check_depths(plan: Plan, rules: TargetRules, title: str) -> Iterator[Refusal]:
    if plan.schedule != "1f1b" or rules.own_depths or rules.inference:
        return
    replicas = [stage.replicas for stage in plan.stages]
    usual = default_depths(plan.num_microbatches, replicas)
    deeper = [index for index, stage in enumerate(plan.stages) if stage.in_flight != usual[index]]
    if deeper:
        first = deeper[0]
        yield Refusal(
            "micro-batches in flight",
            f"stage {first} has {plan.stages[first].in_flight} in flight where 1f1b has "
            f"{usual[first]}, which {title} cannot set",
            "--extra-in-flight 0",
        )


def _check_replicas(plan: Plan, rules: TargetRules, title: str) -> Iterator[Refusal]:
    counts = [stage.replicas for stage in plan.stages]
    if rules.replicas == "any" or set(counts) == {1}:
        return
    if rules.replicas == "none":
        yield Refusal(
            "replicas",
            f"stages have {counts} replicas, and {title} has one device a stage",
            "--max-replicas 1",
        )
    elif len(set(counts)) > 1:
        yield Refusal(
            "unequal replicas",
            f"stages have {counts} replicas, and {title} needs equally many for every stage",
            "--max-replicas 1",
        )
    elif plan.num_microbatches % counts[0]:
        yield Refusal(
            "unequal shares",
            f"{plan.num_microbatches} micro-batches cannot be dealt evenly to {counts[0]} replicas",
            f"--microbatches with a multiple of {counts[0]}",
        )


def _check_recompute(plan: Plan, rules: TargetRules, title: str) -> Iterator[Refusal]:
    modes = [stage.recompute for stage in plan.stages]
    if set(modes) == {"never"}:
        return
    if len(set(modes)) > 1 and rules.recompute:
        yield Refusal(
            "recomputation of some stages",
            f"stages recompute {', '.join(sorted(set(modes)))}, and {title} has one way for all",
            "--recompute never or always",
        )
    elif modes[0] not in rules.recompute:
        stages = [index for index, mode in enumerate(modes) if mode != "never"]
        yield Refusal(
            "recomputation",
            f"stages {_shorten(stages)} recompute their activations as a whole, which {title} "
            "cannot be told",
            "--recompute never",
        )


def _check_tied_weights(plan: Plan, rules: TargetRules, title: str) -> Iterator[Refusal]:
    if plan.tied_sync_time_s > 0 and not (rules.tied_weights or rules.inference):
        yield Refusal(
            "tied weights",
            f"two stages share a weight, whose gradients they sum; {title} would train two copies",
            "--tied together",
        )


def _check_order(plan: Plan, rules: TargetRules, title: str) -> Iterator[Refusal]:
    if plan.layer_order:
        yield Refusal(
            "order of layers",
            f"the plan reorders branches, and {title} runs layers in the model's order",
            "--order given",
        )


def _check_direct_sends(plan: Plan, rules: TargetRules, title: str) -> Iterator[Refusal]:
    if plan.direct_sends and not rules.direct_sends:
        send = plan.direct_sends[0]
        yield Refusal(
            "direct sends",
            f"stage {send.source} sends {send.tensors[0]!r} directly to stage {send.target}, and "
            f"{title} only sends to the next stage",
            "--skips relay",
        )


def _check_relays(plan: Plan, rules: TargetRules, title: str) -> Iterator[Refusal]:
    skipping = find_skipping_value(plan.boundaries) if rules.unit == "layer" else ""
    if skipping:
        yield Refusal(
            "values that skip a stage",
            f"{skipping!r} crosses two cuts, and {title} passes on what the last layer returned",
            "--for torch, which carries it",
        )


def _check_cuts(plan: Plan, rules: TargetRules, title: str) -> Iterator[Refusal]:
    cuts = list(accumulate(plan.balance))[:-1]
    if rules.unit == "module":
        for cut in cuts[:MOST_SHOWN]:
            reason = find_module_conflict(plan.layer_names, cut)
            if reason:
                yield Refusal(
                    "cut inside a module",
                    f"{reason}, and {title} cuts in front of modules",
                    f"--no-cut-after {plan.layer_names[cut - 1]}",
                )
    yield from _check_calls(plan, title)
    if rules.unit != "block":
        return
    try:
        stack = find_stack(plan.layer_names)
    except InvalidInput as error:
        yield Refusal("no blocks", str(error), "export to a target that cuts between layers")
        return
    yield from _check_blocks(plan, cuts, stack, rules, title)


def _check_calls(plan: Plan, title: str) -> Iterator[Refusal]:
    """Refuse modules that two stages call."""
    first: dict[str, int] = {}
    for index, stage in enumerate(plan.stages):
        for name in stage.layer_names:
            module = name.partition("@")[0]
            if first.setdefault(module, index) != index:
                yield Refusal(
                    "a module of two stages",
                    f"stages {first[module]} and {index} call {module!r}, and {title} has each "
                    "module once",
                    f"--together {module},{name}",
                )
                return


def _check_sharding(plan: Plan, rules: TargetRules, title: str) -> Iterator[Refusal]:
    if any(stage.strategy == "fully_shard" for stage in plan.stages):
        yield Refusal(
            "sharded replicas",
            f"replicas share their weights, which an export to {title} does not carry",
            "--max-replicas 1",
        )


def _check_blocks(
    plan: Plan, cuts: list[int], stack: BlockStack, rules: TargetRules, title: str
) -> Iterator[Refusal]:
    names = plan.layer_names
    for cut in [cut for cut in cuts if not is_block_cut(cut, stack, rules)][:MOST_SHOWN]:
        where = f"a stage ends behind {names[cut - 1]!r}"
        if stack.is_inside(cut):
            yield Refusal(
                "cut inside a block",
                f"{where}, inside block {stack.name(stack.count(cut))!r}, and {title} cuts "
                "between blocks",
                f"--no-cut-after {names[cut - 1]}",
            )
        else:
            yield Refusal(
                "cut outside the blocks",
                f"{where}, {'before' if cut <= stack.starts[0] else 'behind'} the blocks, and "
                f"{title} keeps that with the {'first' if cut <= stack.starts[0] else 'last'} one",
                f"--no-cut-after {names[cut - 1]}",
            )
    counts = count_blocks(plan)
    if rules.equal_blocks and len(set(counts)) > 1:
        yield Refusal(
            "unequal stages",
            f"stages have {list(counts)} blocks, and {title} needs equally many",
            "--for maxtext, which tries every number of equal stages",
        )


def is_block_cut(cut: int, stack: BlockStack, rules: TargetRules) -> bool:
    """Return whether a runtime that counts blocks can cut at a layer position."""
    if rules.edges_alone:
        return cut in stack.cuts
    return cut in stack.cuts[1:-1]


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


def _shorten(stages: list[int]) -> str:
    text = ", ".join(map(str, stages[:MOST_SHOWN]))
    return text + (f" and {len(stages) - MOST_SHOWN} more" if len(stages) > MOST_SHOWN else "")


CHECKS: tuple[Callable[[Plan, TargetRules, str], Iterator[Refusal]], ...] = (
    _check_schedule,
    _check_depths,
    _check_replicas,
    _check_sharding,
    _check_recompute,
    _check_tied_weights,
    _check_order,
    _check_direct_sends,
    _check_relays,
    _check_cuts,
)
