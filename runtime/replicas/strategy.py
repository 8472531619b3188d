"""Choice of a strategy for each stage's replicas, checks of the schedule, and its application."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from ...capture.program.segment import Segment, get_references, list_repeated_weights
from ...core.errors import InvalidInput, PlanMismatch
from ...core.plan.plan import Plan
from ...core.plan.schedule import BACKWARDS, Schedule, Work
from ..ranks.process_groups import RankSet
from .ddp import DdpStage
from .deadlock_check import Round, can_finish, list_rounds
from .replaced import replace_parameter
from .replication import StageStrategy
from .sharded import ShardedStage, select_shardable
from .shared_weights import WeightPlacement

Strategy = Literal["reduce", "ddp", "fully_shard"]
"""``reduce`` sums gradients in buckets during the last backward (`GradientSync`), for any number of
replicas and micro-batches. ``ddp`` leaves that to DistributedDataParallel. ``fully_shard`` shards
weights, gradients and optimizer state over the replicas."""

NonDefaultStrategy = Literal["ddp", "fully_shard"]

NAMES = ("reduce", "ddp", "fully_shard")


def choose_strategies(
    plan: Plan, schedule: Schedule, strategy: Strategy | Mapping[int, Strategy] | None
) -> dict[int, NonDefaultStrategy]:
    """Return the strategy of each stage whose gradients `GradientSync` does not sum.

    Given are one strategy for all stages with several replicas, or strategies by stage; the plan's
    stages name them otherwise.
    """
    found: dict[int, NonDefaultStrategy] = {
        stage: asked
        for stage, asked in _asked(plan, schedule, strategy).items()
        if asked != "reduce"
    }
    for stage, asked in found.items():
        if asked == "ddp":
            _check_ddp(schedule, stage)
        elif not list_rounds(schedule, stage):
            raise PlanMismatch(
                f"the replicas of stage {stage} cannot gather its weights together: those with "
                "fewer micro-batches work in another order; use strategy='reduce', or a number of "
                "micro-batches that the replicas divide"
            )
    _check_finishes(schedule, found)
    return found


def _asked(
    plan: Plan, schedule: Schedule, strategy: Strategy | Mapping[int, Strategy] | None
) -> dict[int, Strategy]:
    """Return the strategy requested for each stage with replicas."""
    several = [stage for stage, ranks in enumerate(schedule.stage_ranks) if len(ranks) > 1]
    if strategy is None:
        planned = {stage: plan.stages[stage].strategy for stage in several}
        return {stage: "fully_shard" for stage in several if planned[stage] == "fully_shard"}
    if not isinstance(strategy, Mapping):
        _check_known(strategy)
        if not several and strategy != "reduce":
            raise PlanMismatch(
                f"strategy={strategy!r} is for replicas, and no stage of this plan has any; "
                "plan for more devices than stages, or omit it"
            )
        return dict.fromkeys(several, strategy)
    for stage, asked in strategy.items():
        _check_known(asked)
        if stage not in range(schedule.num_stages):
            raise InvalidInput(
                f"strategy names stage {stage!r}; this plan has stages 0 to "
                f"{schedule.num_stages - 1}"
            )
        if stage not in several and asked != "reduce":
            raise PlanMismatch(
                f"strategy={asked!r} is for replicas, and stage {stage} has one device; stages "
                f"with several: {', '.join(map(str, several)) or 'none'}"
            )
    return dict(strategy)


def _check_known(strategy: Strategy) -> None:
    if strategy not in NAMES:
        raise InvalidInput(f"unknown strategy {strategy!r}; use {', '.join(NAMES)}")


def _check_ddp(schedule: Schedule, stage: int) -> None:
    # The reducer is armed for one backward per step and takes a gradient as final when autograd
    # accumulates it. Two-part backwards accumulate later, and a replica without any never does.
    replicas = schedule.stage_ranks[stage]
    works = [[a.work for a in schedule.ranks[rank] if a.stage == stage] for rank in replicas]
    if any(work in (Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT) for own in works for work in own):
        raise PlanMismatch(
            f"stage {stage} splits its backwards in two parts, and DistributedDataParallel reduces "
            "a gradient after the first; use strategy='reduce' or 'fully_shard', or plan with "
            "--schedule 1f1b"
        )
    idle = [
        rank
        for rank, own in zip(replicas, works, strict=True)
        if not any(work in BACKWARDS for work in own)
    ]
    if idle and any(work in BACKWARDS for own in works for work in own):
        raise PlanMismatch(
            f"rank {idle[0]} has no micro-batch of stage {stage}, and DistributedDataParallel "
            f"waits for its backward; use strategy='reduce', or at least {len(replicas)} "
            "micro-batches"
        )


def split_by_synchronisation(
    chosen: Mapping[int, NonDefaultStrategy],
) -> tuple[set[int], set[int]]:
    """Return stages whose replicas synchronise in every action, and in each's last backward."""
    last = {stage for stage, asked in chosen.items() if asked == "ddp"}
    return set(chosen) - last, last


def _check_finishes(schedule: Schedule, chosen: Mapping[int, NonDefaultStrategy]) -> None:
    every, last = split_by_synchronisation(chosen)
    if (every or last) and not can_finish(schedule, every, last):
        stages = ", ".join(str(stage) for stage in sorted(every | last))
        raise PlanMismatch(
            f"in this schedule the replicas of stages {stages} would deadlock, each waiting for "
            "work that comes after the other's; use strategy='reduce', equal numbers of "
            "replicas for all stages, or micro-batches that the replicas divide"
        )


def apply_strategies(
    chosen: Mapping[int, NonDefaultStrategy],
    schedule: Schedule,
    stages: Mapping[int, Segment],
    placement: WeightPlacement,
    groups: Mapping[RankSet, dist.ProcessGroup],
    device: torch.device,
    others: Sequence[nn.Module],
) -> dict[int, StageStrategy]:
    """Apply the chosen strategies to this rank's stages; called on every rank.

    Weights that another stage or block uses too keep having their gradients summed by
    `GradientSync`, as do those that `select_shardable` leaves out and those that nothing uses.

    ``stages`` are this rank's, on their device, with equal values on every replica. ``others`` are
    modules that reach their weights too (`Captured.roots`): there this rank's shards replace
    sharded weights as well, so that the memory of the whole ones is freed.
    """
    found: dict[int, StageStrategy] = {}
    for index in sorted(chosen.keys() & stages.keys()):
        stage, asked, own = stages[index], chosen[index], placement.names_of(index)
        own -= get_references(stage)  # a module would go on reading the weight before sharding
        names = [name for name, _ in stage.named_parameters() if name in own]
        group = groups[placement.replicas_of(index)]
        if asked == "fully_shard":
            if names := select_shardable(stage, names):
                rounds = list_rounds(schedule, index)[placement.replica_of(index)]
                found[index] = _shard(stage, names, group, device, rounds, others)
            continue
        # DistributedDataParallel takes a gradient as final when autograd first adds to it.
        repeated = set(list_repeated_weights(stage))
        weights = [weight for weight in map(stage.get_parameter, names) if weight.requires_grad]
        if weights := [weight for weight in weights if weight not in repeated]:
            found[index] = DdpStage(weights, group)
    return found


def _shard(
    stage: Segment,
    names: Sequence[str],
    group: dist.ProcessGroup,
    device: torch.device,
    rounds: Sequence[Round],
    others: Sequence[nn.Module],
) -> ShardedStage:
    whole = {stage.get_parameter(name): name for name in names}  # before they are replaced
    made = ShardedStage(stage, names, group, device, rounds)
    for parameter, name in whole.items():
        if (now := stage.get_parameter(name)) is not parameter:  # one in no block stays whole
            replace_parameter(parameter, now, name)
    for module in (each for other in others for each in other.modules()):
        for key, held in module._parameters.items():
            if held in whole:
                module._parameters[key] = stage.get_parameter(whole[held])
    return made
