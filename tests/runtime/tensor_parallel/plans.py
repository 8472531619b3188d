"""Plans that mix tensor parallelism, replicas and shards, written by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.core.profile.profile import LayerProfile, Profile, Timing
from stagewright.planner.price_split import plan_from_balance

MIXES: list[list[Any]] = [
    [["t4"]],
    [["t2", "t2"]],
    [["t2", "r2"]],
    [["r2", "t2"]],
    [["t2r2"]],
    [["t2f2"]],
    [["f2", "t2"]],
    [["t2", "f2"]],
    [["t1", "t2", "t1"]],
    [["t2", "t2"], "zero_bubble"],
    [["t2", "t2"], "gpipe", "always"],
    [["t2", "t2", "t2", "t2"], "interleaved_1f1b"],
    [["f2", "f2"]],
    [["t1", "t2"], "zero_bubble"],
    [["t2", "t2", "t2", "t2"], "zbv"],
    [["z4"]],
    [["z2", "t2"]],
    [["t2z2"]],
    [["t2", "t2"], "1f1b", "layers"],
    [["t2f2"], "gpipe", "layers"],
]
"""Plans on four ranks, as arguments of `Mix`."""

STRATEGIES = {"r": "replicate", "f": "fully_shard", "z": "zero1"}


@dataclass(frozen=True)
class Mix:
    """A plan to write: per stage its tensor degree, replicas and their strategy.

    Stages are written ``t2``, ``r2``, ``f2`` (fully sharded),
    ``z2`` (zero1), or products such as ``t2f2``.
    """

    stages: tuple[str, ...]
    schedule: str = "1f1b"
    recompute: str = "never"

    def __str__(self) -> str:
        return f"{'-'.join(self.stages)} {self.schedule} {self.recompute}"


def parse_stage(text: str) -> tuple[int, int, str]:
    """Return a stage's tensor degree, replicas and strategy."""
    degree, replicas, strategy = 1, 1, "single"
    for kind, number in zip(text[::2], text[1::2], strict=True):
        if kind == "t":
            degree = int(number)
        elif int(number) > 1:
            replicas, strategy = int(number), STRATEGIES[kind]
    return degree, replicas, strategy


def write_plan(captured: Any, mix: Mix, microbatches: int = 4) -> Plan:
    """Write the plan of a captured model: near-equal numbers of layers, devices as they come."""
    graph, structure = captured.graph, captured.structure.to_json()
    profile = Profile(
        model=graph.model,
        inputs=graph.inputs,
        input_structure=structure,
        layers=tuple(
            LayerProfile(
                layer=layer,
                forward=Timing(median_s=1),
                backward=Timing(median_s=2),
                saved_activation_bytes=2**30 if mix.recompute == "layers" else 0,
            )
            for layer in graph.layers
        ),
        boundaries=graph.boundaries,
        parameters=graph.parameters,
        fixed_mode=graph.fixed_mode,
    )
    kinds = [parse_stage(stage) for stage in mix.stages]
    chunks = 2 if mix.schedule in ("interleaved_1f1b", "zbv") else 1
    replicas = [each[1] for each in kinds]
    base, extra = divmod(len(profile.layers), len(kinds))
    plan = plan_from_balance(
        profile,
        Cluster.uniform(sum(replicas) // chunks),
        PlanOptions(
            num_microbatches=microbatches, schedule=mix.schedule, recompute=mix.recompute,
            precision="fp32",
        ),
        [base + (index < extra) for index in range(len(kinds))],
        replicas=replicas if max(replicas) > 1 else (),
    )  # fmt: skip
    stages = tuple(
        stage.model_copy(
            update={
                "tensor": degree,
                "strategy": strategy,
                "devices": tuple(
                    f"{name}.{shard}" if degree > 1 else name
                    for name in stage.devices
                    for shard in range(degree)
                ),
            }
        )
        for stage, (degree, _, strategy) in zip(plan.stages, kinds, strict=True)
    )
    return plan.model_copy(update={"stages": stages})
