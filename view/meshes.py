"""Devices of a stage as a mesh: replicas, the devices that split layers, and their collectives."""

from __future__ import annotations

from ..core.cluster.cluster import Cluster
from ..core.errors import InvalidInput
from ..core.plan.plan import Plan, Stage
from ..core.profile.profile import Profile
from ..planner.problem.split_layers import collectives_s, find_split


def describe_mesh(stage: Stage) -> str:
    """Return the rows and columns of a stage's devices: ``2 replicas × 4, zero1``."""
    if stage.replicas == 1:
        return f"layers split over {stage.tensor}" if stage.tensor > 1 else "1 device"
    split = f" × {stage.tensor}" if stage.tensor > 1 else ""
    return f"{stage.replicas} replicas{split}, {stage.strategy}"


def time_collectives(
    plan: Plan, profile: Profile | None, cluster: Cluster | None
) -> list[tuple[float, float] | None]:
    """Return each stage's collectives of split layers in a forward and a backward, in seconds.

    They are those that the plan's times were made with: by the profile's splits and the innermost
    level of the cluster's links. `None` where layers are whole, or one of the two is not known.
    ``profile`` is at the plan's micro-batch size and in its order.
    """
    if profile is None or cluster is None or not cluster.levels:
        return [None] * plan.num_stages
    return [_time_stage(stage, profile, cluster) for stage in plan.stages]


def _time_stage(stage: Stage, profile: Profile, cluster: Cluster) -> tuple[float, float] | None:
    if stage.tensor == 1:
        return None
    try:
        split = find_split(profile, stage.tensor)
    except InvalidInput:  # the profile no longer knows
        return None
    layers = split.layers[stage.first_layer : stage.first_layer + stage.num_layers]
    times = [collectives_s(own, stage.tensor, cluster.levels[0]) for own in layers]
    return sum(forward_s for forward_s, _ in times), sum(backward_s for _, backward_s in times)
