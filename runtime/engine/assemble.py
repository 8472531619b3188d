"""Assemble a rank's executor: its stages, its channels and the weights it shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...capture.program.segment import Segment
from ...core.plan.plan import Plan
from ...core.plan.schedule import Schedule
from ..batchnorm.fixed_buffers import FixedBuffers
from ..batchnorm.running_statistics import (
    BatchStatistics,
    RunningStatistics,
    Statistics,
    check_statistics_reachable,
)
from ..partition.cut import CutModel
from ..partition.rank_module import build_rank_module
from ..ranks.collective import GroupCollective
from ..ranks.process_groups import ProcessGroups, RankSet
from ..replicas.apply import apply_strategies
from ..replicas.gradient_sync import GradientSync
from ..replicas.replication import Replication
from ..replicas.sharded import is_sharded
from ..replicas.shared_weights import broadcast_initial_values, find_holders, shared_weights
from ..replicas.strategy import NonDefaultStrategy
from ..replicas.sync_batchnorm import SynchronisedStatistics, check_synchronised
from .executor import Executor
from .p2p import P2PChannels, find_connected_pairs, make_channel_groups
from .stage import LossOfFlat, StageRunner


@dataclass(frozen=True)
class WeightSharing:
    """The weights a rank shares with others, and how their gradients are synchronised.

    Attributes:
        groups: The process group of each set of ranks that hold the same weights and includes
            this one; the replicas of a stage are such a set.
        gradient_sync: Sums gradients of the shared weights that no strategy takes care of; `None`
            if there are none.
        replication: Informs ``gradient_sync`` and the strategies about the course of a step.
        holders: By ``id`` of a weight, the number of ranks that hold it, where more than one do.
        chosen: The strategy of each stage whose replicas do not simply sum gradients.
    """

    groups: Mapping[RankSet, dist.ProcessGroup]
    gradient_sync: GradientSync | None
    replication: Replication
    holders: Mapping[int, int]
    chosen: Mapping[int, NonDefaultStrategy]


def share_weights(
    pieces: CutModel,
    stages: Mapping[int, Segment],
    plan: Plan,
    schedule: Schedule,
    ranks: ProcessGroups,
    chosen: Mapping[int, NonDefaultStrategy],
    device: torch.device,
) -> WeightSharing:
    """Give all holders of a weight equal values and set up its synchronisation, on every rank.

    ``stages`` are this rank's, on their device; sharding replaces some of their parameters.
    """
    graph = pieces.captured.graph
    stage_of = [stage for stage, count in enumerate(plan.balance) for _ in range(count)]
    # Every rank computes the groups of all ranks, because creating one is a collective call.
    sets = {find_holders(record, stage_of, schedule) for record in graph.parameters}
    sets.update(schedule.stage_ranks)
    groups = ranks.create_groups(each for each in sets if len(each) > 1)
    broadcast_initial_values(
        graph.parameters, stage_of, schedule, build_rank_module(list(stages.values())), groups
    )
    strategies = apply_strategies(
        chosen,
        stages,
        graph.parameters,
        stage_of,
        schedule,
        groups,
        device,
        pieces.captured.program.model,
    )
    # Again, for sharding has replaced parameters.
    module = build_rank_module(list(stages.values()))
    # Shards are reduced by their strategy, and DistributedDataParallel sums its own weights; all
    # other shared weights are left to `GradientSync`, among them tied ones of any strategy.
    weights = [
        weight
        for weight in shared_weights(graph.parameters, stage_of, schedule, module)
        if not is_sharded(weight.tensor)
    ]
    summed = [w for w in weights if not any(s.sums(w.tensor) for s in strategies.values())]
    together = {each: GroupCollective(group) for each, group in groups.items()}
    stages_here = schedule.stages_of(ranks.rank)
    gradient_sync = GradientSync(summed, together, stages_here) if summed else None
    return WeightSharing(
        groups,
        gradient_sync,
        Replication(gradient_sync, strategies),
        {id(weight.tensor): len(weight.ranks) for weight in weights},
        chosen,
    )


def build_executor(
    pieces: CutModel,
    stages: Mapping[int, Segment],
    plan: Plan,
    schedule: Schedule,
    ranks: ProcessGroups,
    sharing: WeightSharing,
    *,
    loss: LossOfFlat | None,
    device: torch.device,
    batch_statistics: BatchStatistics,
    autocast: torch.dtype | None,
    set_activity: Callable[[str], None],
) -> Executor:
    """Build the executor of one rank and connect it to the others; called on every rank.

    ``loss`` computes a share of the loss from the last stage's outputs and a target; `None` to only
    evaluate. ``set_activity`` is called with a description of what comes next, for error messages.
    """
    if batch_statistics == "synchronised":
        check_synchronised(pieces.stages, schedule, sharing.chosen)
    # Only these stages' statistics are moved here; elsewhere the modules do so, whatever they are.
    moved = [
        stage
        for stage, replicas in zip(pieces.stages, schedule.stage_ranks, strict=True)
        if batch_statistics == "deferred" or len(replicas) > 1
    ]
    check_statistics_reachable(pieces.captured.program, moved)
    last, routes = plan.num_stages - 1, pieces.routes
    channels = make_channel_groups(ranks, find_connected_pairs(schedule.ranks, schedule, routes))
    transport = P2PChannels(ranks.rank, channels, ranks.global_ranks, device)
    runs = {
        index: StageRunner(
            stage,
            routes.received(index) if index else plan.inputs,
            routes.sent(index),
            loss if index == last else None,
            device,
            _statistics(index, stage, schedule, sharing, batch_statistics),
            autocast,
            FixedBuffers(stage) if len(schedule.stage_ranks[index]) > 1 else None,
        )
        for index, stage in stages.items()
    }
    executor = Executor(
        schedule, ranks.rank, routes, runs, transport, sharing.replication, set_activity
    )
    transport.connect()
    return executor


def _statistics(
    index: int,
    stage: Segment,
    schedule: Schedule,
    sharing: WeightSharing,
    policy: BatchStatistics,
) -> Statistics | None:
    replicas = schedule.stage_ranks[index]
    group = sharing.groups.get(replicas)
    if policy == "synchronised":
        return SynchronisedStatistics(stage, GroupCollective(group)) if group is not None else None
    found = RunningStatistics(
        stage,
        policy,
        schedule.num_microbatches,
        len(replicas),
        GroupCollective(group) if group is not None else None,
    )
    return found if found.is_needed else None
