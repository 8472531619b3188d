"""Cells of the conformance table with values sent past stages; prints a line of JSON each.

Run from the repository's root with the number of seconds a cell may take: a few cells, or with
``every`` behind it all of them.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from itertools import pairwise

sys.path.insert(0, "benchmarks")

from conformance_suite import ours
from conformance_suite.cell import NUM_MICROBATCHES, Cell
from conformance_suite.group import Group
from conformance_suite.reference import BY_NAME

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.planner.price_split import plan_from_balance
from stagewright.planner.validation.validate import validate

RANKS = 4


@dataclass(frozen=True)
class Variant(Cell):
    """A cell whose stages have replicas, or recompute."""

    replicas: tuple[int, ...] = ()
    recompute: str = "never"

    @property
    def stages(self) -> int:
        return len(self.replicas) or self.ranks * self.chunks


SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv")

MODELS = ("U-Net", "late input", "T5-like", "fan-out", "int boundary", "two-tower",
          "multiple outputs")  # fmt: skip

ALONE = [
    Variant("U-Net", "forward_only", RANKS),
    Variant("U-Net", "1f1b", RANKS, replicas=(1, 2, 1), recompute="always"),
    Variant("late input", "gpipe", RANKS, replicas=(1, 1, 2)),
]

FEW = [
    Variant("U-Net", "1f1b", RANKS),
    Variant("late input", "gpipe", RANKS),
    Variant("multiple outputs", "interleaved_1f1b", RANKS),
    Variant("int boundary", "zero_bubble", RANKS),
    Variant("T5-like", "zbv", RANKS),
    *ALONE[:2],
]

EVERY = [*(Variant(model, name, RANKS) for model in MODELS for name in SCHEDULES), *ALONE]

NOTHING_SKIPPED = {"fan-out": 8, "T5-like": 4, "two-tower": 4}
"""Up to so many stages, every one has a use for all it would relay."""


def plan_for(cell: Variant) -> Plan:
    """The plan with the table's cuts, values sent straight wherever one could."""
    model = BY_NAME[cell.model]
    profile = ours._profile(model)
    names = [entry.layer.name for entry in profile.layers]
    cuts = model.cuts_into(8) if cell.replicas else model.cuts_into(cell.stages)
    if cell.replicas:
        cuts = cuts[1], cuts[4]
    first = [ours._first_layer(names, cut) for cut in cuts]
    options = PlanOptions(
        num_microbatches=NUM_MICROBATCHES,
        recompute=cell.recompute,
        skips="direct",
        **ours._schedule_options(cell),
    )
    cluster = Cluster.uniform(RANKS)
    made = plan_from_balance(
        profile,
        cluster,
        options,
        [last - begin for begin, last in pairwise([0, *first, len(names)])],
        replicas=cell.replicas,
    )
    validate(made, profile, cluster)
    if cell.stages > NOTHING_SKIPPED.get(cell.model, 0) and not made.direct_sends:
        raise AssertionError(f"{cell} sends nothing past a stage")
    return made.model_copy(update={"num_microbatches": NUM_MICROBATCHES})


def prepare(trial):
    """As planned, and no stage receives what it has no use for."""
    ordinary(trial)
    pipeline = trial._pipeline
    routes = pipeline._executor._routes
    planned = {(send.source, send.target): send.tensors for send in pipeline.plan.direct_sends}
    found = {
        (route.source, route.target): tuple(spec.name for spec in route.tensors)
        for route in routes.all
        if route.skips
    }
    assert {pair: sorted(names) for pair, names in found.items()} == {
        pair: sorted(names) for pair, names in planned.items()
    }
    for send in pipeline.plan.direct_sends:
        for stage in range(send.source + 1, send.target):
            build_rank_module = {
                spec.name for spec in (*routes.received(stage), *routes.sent(stage))
            }
            assert build_rank_module.isdisjoint(send.tensors)


ordinary = ours.OurTrial.prepare


def main(limit_s: float, chosen: list[Variant]) -> None:
    ours.plan_for = plan_for
    ours.OurTrial.prepare = prepare
    for cell in chosen:
        plan_for(cell)  # profiles are kept, so that the ranks, forked from here, need not trace
    group = Group("ours", RANKS, limit_s)
    for cell in chosen:
        outcome = group.outcome(cell)
        row = {"cell": str(cell), "ours": outcome.verdict, "detail": outcome.detail}
        print(json.dumps(row), flush=True)
    group.stop()


if __name__ == "__main__":
    main(float(sys.argv[1]), EVERY if "every" in sys.argv else FEW)
