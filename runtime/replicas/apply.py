"""Application of the chosen replica strategies to the stages of a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ...capture.program.segment import Segment, get_segments
from ...core.graph.graph import Parameter
from ...core.plan.schedule import Schedule
from ..ranks.process_groups import RankSet
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
    groups: Mapping[RankSet, dist.ProcessGroup],
    device: torch.device,
    model: nn.Module,
) -> dict[int, StageStrategy]:
    """Apply the chosen strategies to this rank's stages; called on every rank.

    Weights that another stage uses too keep having their gradients summed by `GradientSync`, as do
    those that `select_shardable` leaves out and those that nothing uses.

    ``stages`` are this rank's, on their device, with equal values on every replica. References of
    ``model``, which they were cut from, to sharded weights are replaced by this rank's shards, so
    that the memory of the whole weights is freed.
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
    """Return the names of a stage's parameters that no other stage uses."""
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
    whole = {stage.get_parameter(name): name for name in names}  # before they are replaced
    made = ShardedStage(get_segments(stage), names, group, device, options)
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter in whole:
                module._parameters[key] = stage.get_parameter(whole[parameter])
    return made
