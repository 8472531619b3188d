"""Put the chosen strategies on the stages of a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ...capture.program.segment import Segment, get_segments
from ...core.graph.graph import Parameter
from ...core.plan.schedule import Schedule
from ..ranks.process_groups import Ranks
from .ddp import DdpStage
from .replication import StageStrategy
from .sharded import FullyShard, ShardedStage, select_shardable
from .strategy import NonDefaultStrategy


def apply_strategies(
    chosen: Mapping[int, NonDefaultStrategy],
    stages: Mapping[int, Segment],
    records: Sequence[Parameter],
    stage_of: Sequence[int],
    schedule: Schedule,
    groups: Mapping[Ranks, dist.ProcessGroup],
    device: torch.device,
    model: nn.Module,
) -> dict[int, StageStrategy]:
    """Let the replicas of this rank's stages do what was chosen; called on every rank.

    Weights that another stage uses too stay as they are: all their holders sum their gradients
    (`GradientSync`). So do those that `select_shardable` leaves out, and those that nothing uses.

    Args:
        chosen: What each stage's replicas do, where that is not to sum gradients.
        stages: This rank's, on their device, with the same values on every replica.
        records: The model's parameters.
        stage_of: The stage of each layer.
        schedule: Which ranks hold which stage.
        groups: Of each set of replicas.
        device: Where the stages are.
        model: What they were cut from; where it holds a weight that is sharded, it holds this
            rank's shard from now on, so that the whole one is let go.
    """
    found: dict[int, StageStrategy] = {}
    for index in sorted(chosen.keys() & stages.keys()):
        stage, asked = stages[index], chosen[index]
        names = _own(index, stage, records, stage_of)
        group = groups[schedule.stage_ranks[index]]
        if isinstance(asked, FullyShard):
            names = select_shardable(stage, names)
            if names:
                found[index] = _sharded(stage, names, group, device, asked, model)
        elif weights := [p for p in map(stage.get_parameter, names) if p.requires_grad]:
            found[index] = DdpStage(weights, group)
    return found


def _own(
    index: int, stage: Segment, records: Sequence[Parameter], stage_of: Sequence[int]
) -> list[str]:
    """Names of a stage's parameters that it uses, and no other stage does."""
    own = {
        name
        for record in records
        if {stage_of[layer] for layer in record.layers} == {index}
        for name in record.names
    }
    return [name for name, _ in stage.named_parameters() if name in own]


def _sharded(
    stage: Segment,
    names: Sequence[str],
    group: dist.ProcessGroup,
    device: torch.device,
    options: FullyShard,
    model: nn.Module,
) -> ShardedStage:
    whole = {stage.get_parameter(name): name for name in names}
    made = ShardedStage(get_segments(stage), names, group, device, options)
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter in whole:
                module._parameters[key] = stage.get_parameter(whole[parameter])
    return made
