"""Assemble a rank's executor: its stages, its channels and the weights it shares."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from ...capture.program.segment import Segment, list_repeated_weights
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
from ..ranks.collective import Collective, GroupCollective
from ..ranks.process_groups import ProcessGroups, RankSet
from ..ranks.rank_grid import RankGrid
from ..replicas.gradient_hooks import GradientHooks
from ..replicas.gradient_sync import GradientSync
from ..replicas.replication import Replication
from ..replicas.sharded import is_sharded
from ..replicas.shared_optimizer import UpdateOwners
from ..replicas.shared_weights import WeightPlacement
from ..replicas.strategy import NonDefaultStrategy, apply_strategies
from ..replicas.sync_batchnorm import SynchronisedStatistics, check_synchronised
from ..tensor_parallel.split_model import divide_weights
from .aux_losses import AuxLoss, AuxLossReader
from .batch_io import BatchOutputs, LossFunction
from .executor import Executor
from .loss_reduction import LossReduction
from .p2p import P2PChannels, find_connected_pairs, make_channel_groups
from .stage import LossOfFlat, StageRunner


@dataclass(frozen=True)
class AssembledRank:
    """One rank of a pipeline, connected to the others.

    Attributes:
        module: Its parameters and buffers, under the model's names.
        holders: By ``id`` of a weight, the number of ranks that hold it, where more than one do.
        executor: Runs its stages.
        outputs: Computes the last stage's losses and joins its outputs.
        owned: Weights of which one replica keeps the optimizer's state, by stage.
    """

    module: nn.Module
    holders: Mapping[int, int]
    executor: Executor
    outputs: BatchOutputs
    owned: Mapping[int, UpdateOwners]


def assemble_rank(
    pieces: CutModel,
    stages: Mapping[int, Segment],
    plan: Plan,
    schedule: Schedule,
    ranks: ProcessGroups,
    grid: RankGrid,
    *,
    chosen: Mapping[int, NonDefaultStrategy],
    loss_fn: LossFunction | None,
    loss_reduction: LossReduction,
    device: torch.device,
    batch_statistics: BatchStatistics,
    autocast: torch.dtype | None,
    aux_losses: Sequence[Sequence[AuxLoss]],
    set_activity: Callable[[str], None],
) -> AssembledRank:
    """Give all holders of a weight equal values and connect this rank's stages; on every rank.

    Sharding, where it is ``chosen``, replaces some of the stages' parameters. ``aux_losses`` are
    those of every stage of the model; none to only evaluate. ``set_activity`` is called with a
    description of what comes next, for error messages.
    """
    records = pieces.captured.graph.parameters
    placement = WeightPlacement(records, plan.balance, schedule, grid, ranks.rank)
    weights = _connect_weights(pieces, stages, plan, schedule, placement, ranks, chosen, device)
    groups = weights.groups
    together = {each: GroupCollective(group) for each, group in groups.items()}
    if batch_statistics == "synchronised":
        check_synchronised(pieces.stages, schedule, chosen)
    _check_statistics(pieces, schedule, batch_statistics)
    routes, last = pieces.routes, stages.get(len(plan.stages) - 1)
    replicas = placement.replicas_of(len(plan.stages) - 1) if last is not None else ()
    split = pieces.split
    outputs = BatchOutputs(
        pieces.captured, loss_fn, plan.num_microbatches, device, last, replicas,
        groups.get(replicas), split.output_parts if split is not None else None,
        split.divided if split is not None else (),
        split.group if split is not None and split.group.degree > 1 else None,
        loss_reduction,
    )  # fmt: skip
    pairs = find_connected_pairs(schedule.ranks, schedule, routes, grid)
    channels = make_channel_groups(ranks, pairs)
    transport = P2PChannels(ranks.rank, channels, ranks.global_ranks, device, grid)
    runners = build_stage_runners(
        pieces,
        stages,
        plan,
        schedule,
        lambda stage: together.get(placement.replicas_of(stage)),
        loss=outputs.compute_loss_share if loss_fn is not None else None,
        device=device,
        policy=batch_statistics,
        autocast=autocast,
        aux_losses=aux_losses,
    )
    here, sender_of = grid.locate(ranks.rank)[0], partial(grid.sender_to, ranks.rank)
    executor = Executor(
        schedule, here, routes, runners, transport, weights.replication, set_activity, sender_of
    )
    transport.connect()
    return AssembledRank(weights.module, weights.holders, executor, outputs, weights.owned)


@dataclass(frozen=True)
class _ConnectedWeights:
    """A rank's weights, with the groups of ranks that hold the same ones; see `AssembledRank`."""

    groups: Mapping[RankSet, dist.ProcessGroup]
    module: nn.Module
    holders: Mapping[int, int]
    replication: Replication
    owned: Mapping[int, UpdateOwners]


def _connect_weights(
    pieces: CutModel,
    stages: Mapping[int, Segment],
    plan: Plan,
    schedule: Schedule,
    placement: WeightPlacement,
    ranks: ProcessGroups,
    chosen: Mapping[int, NonDefaultStrategy],
    device: torch.device,
) -> _ConnectedWeights:
    """Give weights equal values, then divide and shard them as planned; on every rank."""
    captured = pieces.captured
    placement.check_gradients_dense(captured.program.model)
    whole = build_rank_module([*stages.values()]).to(device)
    groups = placement.broadcast_initial_values(whole, ranks, device)
    divided: Collection[str] = ()
    if pieces.split is not None and (sharing := placement.sharing_ranks())[1:]:
        pieces.split.group.connect(groups[sharing])
        divide_weights([*stages.values()], pieces.split)
        divided = pieces.split.divided
    strategies = apply_strategies(
        chosen, schedule, stages, placement, groups, device, captured.roots
    )
    module = build_rank_module([*stages.values()])  # again, for its parameters were replaced
    # Shards are reduced by their strategy, and DistributedDataParallel sums its own weights; all
    # other shared weights are left to `GradientSync`, among them tied ones of any strategy.
    weights = [w for w in placement.shared_weights(module) if not is_sharded(w.tensor)]
    summed = [w for w in weights if not any(s.sums(w.tensor) for s in strategies.values())]
    together = {each: GroupCollective(group) for each, group in groups.items()}
    repeated = [weight for stage in stages.values() for weight in list_repeated_weights(stage)]
    gradient_sync = GradientSync(summed, together, stages, repeated) if summed else None
    owned = {
        index: UpdateOwners(_own_weights(stage, placement.names_of(index)), groups[replicas])
        for index, stage in stages.items()
        if plan.stages[index].strategy == "zero1"
        and index not in chosen
        and len(replicas := placement.replicas_of(index)) > 1
    }
    holders = placement.count_holders(module, divided, is_sharded)
    parts = (pieces.split.join, pieces.split.take) if pieces.split and divided else None
    hooks = GradientHooks(dict(module.named_parameters()), parts, [w.tensor for w in weights])
    replication = Replication(gradient_sync, strategies, hooks)
    return _ConnectedWeights(groups, module, holders, replication, owned)


def _own_weights(stage: Segment, names: Collection[str]) -> list[nn.Parameter]:
    return [weight for name, weight in stage.named_parameters() if name in names]


def build_stage_runners(
    pieces: CutModel,
    stages: Mapping[int, Segment],
    plan: Plan,
    schedule: Schedule,
    together: Callable[[int], Collective | None],
    *,
    loss: LossOfFlat | None,
    device: torch.device,
    policy: BatchStatistics,
    autocast: torch.dtype | None = None,
    aux_losses: Sequence[Sequence[AuxLoss]] = (),
    kind: Callable[..., StageRunner] = StageRunner,
) -> dict[int, StageRunner]:
    """Return the runners of a rank's stages; ``together`` returns a stage's replicas, if several.

    ``loss`` computes a share of the loss on the last stage; `None` to only evaluate.
    """
    last, routes = plan.num_stages - 1, pieces.routes
    return {
        index: kind(
            stage,
            routes.received(index) if index else plan.inputs,
            routes.sent(index),
            loss if index == last else None,
            device,
            _statistics(stage, policy, schedule, index, together(index)),
            autocast,
            FixedBuffers(stage) if len(schedule.stage_ranks[index]) > 1 else None,
            AuxLossReader(stage, aux_losses[index]) if aux_losses and aux_losses[index] else None,
            1 / plan.num_microbatches,
            not any(is_sharded(parameter) for parameter in stage.parameters()),
        )
        for index, stage in stages.items()
    }


def _check_statistics(pieces: CutModel, schedule: Schedule, policy: BatchStatistics) -> None:
    # Only these stages' statistics are moved here; elsewhere the modules do so, whatever they are.
    moved = [
        stage
        for stage, replicas in zip(pieces.stages, schedule.stage_ranks, strict=True)
        if policy == "deferred" or len(replicas) > 1
    ]
    check_statistics_reachable(pieces.captured.program, moved)


def _statistics(
    stage: Segment,
    policy: BatchStatistics,
    schedule: Schedule,
    index: int,
    together: Collective | None,
) -> Statistics | None:
    if policy == "synchronised":
        return SynchronisedStatistics(stage, together) if together is not None else None
    replicas = len(schedule.stage_ranks[index])
    found = RunningStatistics(stage, policy, schedule.num_microbatches, replicas, together)
    return found if found.is_needed else None
