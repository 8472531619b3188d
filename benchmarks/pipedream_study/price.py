"""The step our simulator sees in the stages that PipeDream likes best.

PipeDream plans level by level: a stage of the higher level may be a pipeline of its own inside
each of its machines. Our plans have one row of stages, and the devices of a stage follow each
other. So, in this order:

as planned  every stage that holds a pipeline is on one machine: its stages take its place
copies      the highest level is one stage, the same pipeline in each of R machines, which take
            turns with the micro-batches and then sum gradients, inside a machine and between them
moved       other pipelines held R times: their stages get R times the replicas, side by side, so
            that what was sent inside a machine may be sent between machines
one level   where stages cannot be placed: its optimum for all machines on the outermost links
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipedream_study.results import Column, PipeDreamsPlan, Placement, Settings
from stagewright.core.cluster.cluster import LinkLevel
from stagewright.core.errors import Infeasible, InvalidInput
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.core.profile.profile import Profile
from stagewright.planner.pipedream.objective import PipeDreamStage, pipedream_chain
from stagewright.planner.price_split import plan_from_balance
from stagewright.planner.simulator.durations import StageTimes
from stagewright.planner.simulator.simulate import step_time


def pipedreams_plan(
    profile: Profile, options: PlanOptions, column: Column, settings: Settings
) -> PipeDreamsPlan:
    """PipeDream's optimum for the profile as a chain, in a synchronous 1F1B step."""
    reasons = []
    for levels in (column,) if len(column.machines) == 1 else (column, column.one_level()):
        stages = pipedreams_stages(profile, levels)
        balance, replicas = flat_stages(stages)
        placement: Placement = "one level" if levels is not column else how_placed(stages)
        try:
            if placement == "copies":
                step_s = copies_step_s(profile, options, column, settings, stages[0])
            else:
                cluster = column.cluster(settings.latency_s, settings.memory_bytes)
                step_s = plan_from_balance(
                    profile, cluster, options, balance, replicas=replicas
                ).step_time_s
        except (Infeasible, InvalidInput) as error:
            reasons.append(str(error))
            continue
        as_json = tuple(
            {"layers": layers, "replicas": count}
            for layers, count in zip(balance, replicas, strict=True)
        )
        return PipeDreamsPlan(step_s, as_json, levels, placement, "; ".join(reasons) or None)
    return PipeDreamsPlan(reason="; ".join(reasons))


def pipedreams_stages(profile: Profile, levels: Column) -> tuple[PipeDreamStage, ...]:
    """Return the bytes that a cut sends: everything that crosses it."""
    layers = profile.layers
    return pipedream_chain(
        [entry.forward.median_s + entry.backward.median_s for entry in layers],
        [entry.layer.parameter_bytes for entry in layers],
        [boundary.forward_bytes for boundary in profile.boundaries],
        levels.machines,
        levels.bandwidths_bytes_per_s,
    ).stages


def how_placed(stages: Sequence[PipeDreamStage]) -> Placement:
    """Of stages for all levels."""
    if not any(holds_copies(stage) for stage in stages):
        return "as planned"
    if len(stages) == 1 and not any(holds_copies(inner) for inner in stages[0].inner):
        return "copies"
    return "moved"


def holds_copies(stage: PipeDreamStage) -> bool:
    """Return True if several machines hold the same pipeline at some level."""
    if stage.replicas > 1 and len(flat_stages(stage.inner)[0]) > 1:
        return True
    return any(holds_copies(inner) for inner in stage.inner)


def flat_stages(stages: Sequence[PipeDreamStage], copies: int = 1) -> tuple[list[int], list[int]]:
    """Layers and replicas of all stages of the lowest level, replicas counted over all levels."""
    balance, replicas = [], []
    for stage in stages:
        if stage.inner:
            inner_balance, inner_replicas = flat_stages(stage.inner, copies * stage.replicas)
            balance += inner_balance
            replicas += inner_replicas
        else:
            balance.append(len(stage.node_ids))
            replicas.append(copies * stage.replicas)
    return balance, replicas


def copies_step_s(
    profile: Profile,
    options: PlanOptions,
    column: Column,
    settings: Settings,
    stage: PipeDreamStage,
) -> float:
    """Return the step of one machine's pipeline, gradients summed over all machines too.

    The machine with the most micro-batches is simulated; none finishes later.
    """
    share = math.ceil(options.num_microbatches / stage.replicas)
    balance, replicas = flat_stages(stage.inner)
    one_machine = plan_from_balance(
        profile,
        column.one_machine().cluster(settings.latency_s, settings.memory_bytes),
        options.model_copy(update={"num_microbatches": share}),
        balance,
        replicas=replicas,
    )
    return with_sums_between(one_machine, column.links(settings.latency_s)[-1], stage.replicas)


def with_sums_between(pipeline: Plan, link: LinkLevel, machines: int) -> float:
    """Return the step of one of several pipelines; each of a stage's r devices sums 1/r with them.

    As `Cluster.all_reduce_time_s` has it for devices of whole groups.
    """
    stages = pipeline.stages
    times = StageTimes(
        forward_s=[stage.forward_time_s for stage in stages],
        backward_s=[stage.backward_time_s for stage in stages],
        send_forward_s=[stage.send_forward_time_s for stage in stages[:-1]],
        send_backward_s=[stage.send_backward_time_s for stage in stages[1:]],
        sync_s=[
            stage.sync_time_s
            + link.all_reduce_time_s(-(-stage.memory.gradients_bytes // stage.replicas), machines)
            for stage in stages
        ],
    )
    depths = [stage.in_flight for stage in stages]
    replicas = [stage.replicas for stage in stages]
    return step_time("1f1b", times, pipeline.num_microbatches, replicas, depths)[0]
