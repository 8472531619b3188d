"""Random plans that a target can express, made without the planner."""

from __future__ import annotations

import random
import re
from itertools import pairwise

from stagewright.core.graph.tensors import TensorSpec
from stagewright.core.plan.plan import MemoryUse, Plan, PlanOptions, Proof, Stage
from stagewright.core.plan.schedule import ScheduleName
from stagewright.formats.target import TargetRules
from stagewright.schedules.action_order import default_depths

STYLES = (
    (("model.embed_tokens", "model.rotary_emb"), "model.layers", ("model.norm", "lm_head")),
    (("transformer.wte", "transformer.wpe"), "transformer.h", ("transformer.ln_f", "lm_head")),
    (("tok_embeddings",), "layers", ("norm", "output")),
    (("embed",), "blocks", ("head",)),
)
"""Names in front of the blocks, of the blocks, and behind them."""

PIECES = ("", ".attention", ".mlp", ".moe.experts")


def draw_layers(draw: random.Random, *, whole: bool) -> tuple[tuple[str, ...], list[int], int]:
    """Return names of layers, where each block begins, and where the last one ends."""
    before, prefix, after = draw.choice(STYLES)
    names = list(before)
    starts = []
    for block in range(draw.randint(2, 40)):
        starts.append(len(names))
        parts = 1 if whole or draw.random() < 0.5 else draw.randint(2, 3)
        pieces = [""] if parts == 1 else PIECES[1 : 1 + parts]
        names += [f"{prefix}.{block}{piece}" for piece in pieces]
    return (*names, *after), starts, len(names)


def draw_plan(draw: random.Random, rules: TargetRules) -> Plan:
    """Return a plan of a random model, cut at random where the rules allow."""
    names, starts, end = draw_layers(draw, whole=rules.unit == "layer")
    legal = [*starts[1:]]
    if rules.cuts_around_blocks:
        legal = [*starts, end]
    if rules.cuts_behind_blocks:
        legal = [*starts[1:], end]
    if rules.unit == "layer":
        legal = list(range(1, len(names)))
    schedule: ScheduleName = draw.choice(rules.schedules or ("1f1b",))
    several = schedule not in ("gpipe", "1f1b", "zero_bubble")
    chunks = 2 if several else 1
    if rules.equal_blocks:
        counts = [n for n in range(2, len(starts) + 1) if len(starts) % n == 0 and n % chunks == 0]
        num_stages = draw.choice(counts) if counts else 1
        share = len(starts) // num_stages
        cuts = [starts[share * stage] for stage in range(1, num_stages)]
        chunks = chunks if counts else 1
        schedule = schedule if counts else rules.schedules[0]
    else:
        fewest = chunks  # Megatron has no virtual stages on one rank
        most = max(fewest, min(6, (len(legal) + 1) // chunks))
        num_stages = chunks * draw.randint(fewest, most)
        if num_stages - 1 > len(legal):
            num_stages, chunks, schedule = 1, 1, (rules.schedules or ("1f1b",))[0]
        cuts = sorted(draw.sample(legal, num_stages - 1))
    recompute = draw.choice(["never", *rules.recompute])
    return build_plan(names, [0, *cuts, len(names)], schedule, chunks, draw, rules, recompute)


def find_blocks(names: tuple[str, ...]) -> list[tuple[int, int]]:
    """Return where each numbered module begins and ends."""
    found = [re.search(r"(?:^|\.)(\d+)(?:\.|$)", name) for name in names]
    numbers = [match and match[1] for match in found]
    changes = [at for at in range(1, len(names)) if numbers[at] != numbers[at - 1]]
    spans = pairwise((0, *changes, len(names)))
    return [span for span in spans if numbers[span[0]] is not None]


def list_recomputed(
    recompute: str, blocks: list[tuple[int, int]], first: int, last: int
) -> dict[str, object]:
    """Return the fields of a stage that say what it computes again."""
    if recompute != "layers":
        return {"recompute": recompute}
    own = tuple(block for block in blocks if first <= block[0] < last)
    return {"recompute": "layers" if own else "never", "checkpoints": own}


def build_plan(
    names: tuple[str, ...],
    cuts: list[int],
    schedule: ScheduleName,
    chunks: int,
    draw: random.Random,
    rules: TargetRules,
    recompute: str = "never",
) -> Plan:
    """Build the document of a plan with these cuts; its times and bytes mean nothing."""
    places = (len(cuts) - 1) // chunks
    replicas = 1
    if rules.replicas != "none":
        replicas = draw.choice([1, 1, 2])
    mixed = [draw.randint(1, 3) for _ in range(places)] if rules.replicas == "any" else ()
    held = list(mixed or [replicas] * places)
    num_microbatches = 2 * places * draw.randint(1, 3)
    checkpoints = find_blocks(names) if recompute == "layers" else []
    depths = default_depths(num_microbatches, held * chunks)
    stages = [
        Stage(
            first_layer=first,
            num_layers=last - first,
            layer_names=names[first:last],
            module_fqns=names[first:last],
            devices=tuple(
                f"gpu{sum(held[: index % places]) + each}" for each in range(held[index % places])
            ),
            forward_time_s=1.0,
            backward_time_s=0.0 if rules.inference else 2.0,
            memory=MemoryUse(weights_bytes=10),
            memory_limit_bytes=100,
            replicas=held[index % places],
            in_flight=depths[index] if schedule == "1f1b" else num_microbatches,
            **list_recomputed(recompute, checkpoints, first, last),
            strategy="replicate" if held[index % places] > 1 else "single",
        )
        for index, (first, last) in enumerate(pairwise(cuts))
    ]
    return Plan(
        model="Random",
        balance=tuple(stage.num_layers for stage in stages),
        stages=tuple(stages),
        options=PlanOptions(),
        schedule=schedule,
        num_microbatches=num_microbatches,
        chunks=chunks,
        step_time_s=1.0,
        bubble_fraction=0.0,
        proof=Proof(objective="x", value=1.0, lower_bound=1.0, status="optimal"),
        inputs=(TensorSpec(name="ids", shape=(4, 128), dtype="int64"),),
        chain_break="",
    )
