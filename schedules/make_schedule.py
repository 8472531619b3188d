"""Schedules by name."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ..core.errors import InvalidInput
from ..core.plan.schedule import Action, Schedule, ScheduleName
from .action_order import WORKS, check_depths, default_depths, make_order
from .activation_memory import most_in_flight
from .layout import make_layout


def make_schedule(
    name: ScheduleName,
    num_stages: int,
    num_microbatches: int,
    *,
    replicas: Sequence[int] = (),
    depths: Sequence[int] = (),
    chunks: int = 1,
) -> Schedule:
    """Return the schedule of that name.

    The orders are those of ``torch.distributed.pipelining``, so a plan is costed by the order in
    which it will run; see `action_order`.

    Args:
        name: Name of the schedule.
        num_stages: Stages over all ranks.
        num_microbatches: Micro-batches per step over all replicas.
        replicas: Ranks of each stage, one each if empty; replica k mod r of a stage runs
            micro-batch k. gpipe, 1f1b and forward_only support any numbers, others equal ones.
        depths: For 1f1b, forwards that each replica of a stage runs before its first backward;
            the default warm-up if empty.
        chunks: Stages per rank: two for zbv and dualpipev, any for interleaved and looped
            schedules, else one.

    Raises:
        InvalidInput: The name is unknown, or the schedule does not support these numbers.
    """
    order = make_order(
        name, num_microbatches, replicas_or_one(num_stages, replicas), depths, chunks
    )
    rows = zip(order.stage.tolist(), order.work.tolist(), order.microbatch.tolist(), strict=True)
    actions = [
        Action(stage=stage, work=WORKS[work], microbatch=index) for stage, work, index in rows
    ]
    bounds = order.first.tolist()
    return Schedule(
        name=name,
        num_microbatches=num_microbatches,
        stage_ranks=order.stage_ranks,
        ranks=tuple(tuple(actions[begin:end]) for begin, end in pairwise(bounds)),
    )


def replicas_or_one(num_stages: int, replicas: Sequence[int]) -> tuple[int, ...]:
    """Return the replicas of each stage, one each if none are given."""
    if not replicas:
        return (1,) * num_stages
    if len(replicas) != num_stages:
        raise InvalidInput(f"{len(replicas)} numbers of replicas for {num_stages} stages")
    return tuple(replicas)


def in_flight(
    name: ScheduleName,
    stage: int,
    num_stages: int,
    num_microbatches: int,
    *,
    replicas: Sequence[int] = (),
    depths: Sequence[int] = (),
    chunks: int = 1,
) -> int:
    """Return the most micro-batches whose activations one replica of a stage holds at once.

    GPipe keeps all that it is dealt (Huang et al. 2019), 1F1B its warm-up (`default_depths`),
    zero_bubble also those whose weight part is due: min(m, S) in all (Qi et al. 2023). Without
    backwards only the current micro-batch is held. Other schedules are counted in O(actions). The
    arguments are those of `make_schedule`.
    """
    replicas = replicas_or_one(num_stages, replicas)
    if not 0 <= stage < num_stages:
        raise InvalidInput(f"stage {stage} is not one of {num_stages} stages")
    if name in ("gpipe", "1f1b", "forward_only"):
        make_layout(name, num_microbatches, replicas, chunks)
    if name == "forward_only":
        return 1
    if name == "gpipe":
        return -(-num_microbatches // replicas[stage])
    if name == "1f1b":
        if depths:
            return check_depths(num_microbatches, replicas, depths)[stage]
        return default_depths(num_microbatches, replicas)[stage]
    return most_in_flight(make_order(name, num_microbatches, replicas, depths, chunks))[stage]
