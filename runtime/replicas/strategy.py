"""Choice of a strategy for each stage's replicas, and checks that the schedule allows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from ...core.errors import InvalidInput, PlanMismatch
from ...core.plan.plan import Plan
from ...core.plan.schedule import BACKWARDS, Schedule, Work
from .deadlock_check import can_finish, describe_imbalance
from .sharded import FullyShard

StrategyName = Literal["reduce", "ddp", "fully_shard"]
Strategy = StrategyName | FullyShard
"""``reduce`` sums gradients in buckets during the last backward (`GradientSync`), for any number of
replicas and micro-batches. ``ddp`` leaves that to DistributedDataParallel. ``fully_shard`` shards
weights, gradients and optimizer state over the replicas."""

NonDefaultStrategy = Literal["ddp"] | FullyShard

NAMES = ("reduce", "ddp", "fully_shard")


def choose_strategies(
    plan: Plan, schedule: Schedule, strategy: Strategy | Mapping[int, Strategy] | None
) -> dict[int, NonDefaultStrategy]:
    """Return the strategy of each stage whose gradients `GradientSync` does not sum.

    Given are one strategy for all stages with several replicas, or strategies by stage; the plan's
    stages name them otherwise.
    """
    found = {
        stage: FullyShard() if asked == "fully_shard" else asked
        for stage, asked in _asked(plan, schedule, strategy).items()
        if asked != "reduce"
    }
    for stage, asked in found.items():
        if asked == "ddp":
            _check_ddp(schedule, stage)
        elif asked.synchronises_in_actions and (why := describe_imbalance(schedule, stage)):
            raise PlanMismatch(
                f"stage {stage} cannot gather or reduce in every action: {why}; use "
                "FullyShard() with its defaults, which does so once per step, or a number of "
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
    if not isinstance(strategy, FullyShard) and strategy not in NAMES:
        raise InvalidInput(
            f"unknown strategy {strategy!r}; use {', '.join(NAMES)} or FullyShard(...)"
        )


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


def _check_finishes(schedule: Schedule, chosen: Mapping[int, NonDefaultStrategy]) -> None:
    every = {
        stage
        for stage, asked in chosen.items()
        if isinstance(asked, FullyShard) and asked.synchronises_in_actions
    }
    last = {stage for stage, asked in chosen.items() if asked == "ddp"}
    if (every or last) and not can_finish(schedule, every, last):
        stages = ", ".join(str(stage) for stage in sorted(every | last))
        raise PlanMismatch(
            f"in this schedule the replicas of stages {stages} would deadlock, each waiting for "
            "work that comes after the other's; use strategy='reduce', FullyShard() with its "
            "defaults, or equal numbers of replicas for all stages"
        )
