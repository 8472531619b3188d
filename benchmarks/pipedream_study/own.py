"""PipeDream's profiles under our own objectives, compared with PipeDream's plans.

Both plan the same profile for the same cluster, in the same order of layers; both steps are
synchronous 1F1B of the same micro-batches by the same simulator.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

from pipedream_study.price import pipedreams_plan
from pipedream_study.results import Column, Own, PipeDreamsPlan, Result, Settings
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.formats.pipedream_graph import PipeDreamGraph, to_profile
from stagewright.planner.plan import plan

OwnObjective = Literal["step_time", "throughput"]

MICROBATCHES_A_DEVICE = 4
"""From four times the stages on GPipe found bubbles negligible (Huang et al., NeurIPS 2019)."""


def solve_own(
    objective: OwnObjective,
    name: str,
    graph: PipeDreamGraph,
    columns: Sequence[Column],
    settings: Settings,
) -> list[Result]:
    """One plan a cluster; making the profile is part of the first one's ``solve_s``.

    Raises:
        Infeasible: No plan fits the devices' memory.
    """
    results = []
    begin_s = time.perf_counter()
    profile = to_profile(graph)
    for column in columns:
        options = plan_options(objective, column, settings)
        ours = plan(profile, column.cluster(settings.latency_s, settings.memory_bytes), options)
        solve_s = time.perf_counter() - begin_s
        theirs = pipedreams_plan(profile, options, column, settings)
        results.append(_result(name, column, ours, solve_s, theirs))
        begin_s = time.perf_counter()
    return results


def plan_options(objective: OwnObjective, column: Column, settings: Settings) -> PlanOptions:
    return PlanOptions(
        num_microbatches=settings.microbatches or MICROBATCHES_A_DEVICE * column.num_devices,
        objective=objective,
        max_replicas=None,
        recompute="auto",
        gap=settings.gap,
    )


def _result(
    name: str, column: Column, ours: Plan, solve_s: float, theirs: PipeDreamsPlan
) -> Result:
    proof = ours.proof
    return Result(
        objective=ours.options.objective,
        profile=name,
        column=column,
        time_s=ours.step_time_s,
        lower_bound_s=proof.simulated_lower_bound_s,
        gap=proof.gap,
        solve_s=solve_s,
        stages=tuple(
            {"layers": stage.num_layers, "replicas": stage.replicas} for stage in ours.stages
        ),
        own=Own(
            microbatches=ours.num_microbatches,
            objective_s=proof.value,
            objective_lower_bound_s=proof.lower_bound,
            pipedream=theirs,
        ),
    )
