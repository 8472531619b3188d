"""Warm-up depths of 1F1B: forwards that a stage runs before its first backward."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.errors import InvalidInput


def default_depths(
    num_microbatches: int, replicas: Sequence[int], extra: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return the default warm-up depth of each stage, per replica.

    A stage with depth d on r ranks has D = d r micro-batches between forward and backward. To keep
    the next stage, with D' of them, busy, a stage has to run D' ahead plus one round of its own:
    d = 1 + ceil(D' / r), starting from d = 1 at the last stage, and at most the n micro-batches
    that a replica gets. With one rank per stage this is min(m, S - s) (PipeDream-Flush, Narayanan
    et al. 2021). PipeDream's rule for replicas, ceil(ranks from here on / r) (Narayanan et al.
    2019), rounds each stage separately; if replicas do not divide each other, that starves stages,
    which costs half of the step and more in the plans of `benchmarks/planner.py`.

    Args:
        num_microbatches: Micro-batches per step.
        replicas: Ranks of each stage.
        extra: Depth added to each stage; empty for none.
    """
    depths: list[int] = []
    ahead = 0
    more = extra or (0,) * len(replicas)
    for count, added in zip(reversed(replicas), reversed(more), strict=True):
        depth = 1 + -(-ahead // count)
        ahead = depth * count
        depths.append(min(depth + added, -(-num_microbatches // count)))
    return tuple(reversed(depths))


def check_depths(
    num_microbatches: int, replicas: Sequence[int], depths: Sequence[int]
) -> tuple[int, ...]:
    """Return chosen depths, capped at the micro-batches of a replica, if they cannot deadlock.

    Stage t begins the backward of micro-batch k after the forward of k + (d_t - 1) r_t. For that
    forward, an earlier stage s needs the backward of k + (d_t - 1) r_t - d_s r_s. The step
    therefore finishes if (d_t - 1) r_t < d_s r_s for all s < t: every backward then waits only for
    backwards of earlier micro-batches.

    Raises:
        InvalidInput: There is not one depth of at least 1 per stage, or the condition fails.
    """
    if len(depths) != len(replicas):
        raise InvalidInput(f"{len(depths)} depths for {len(replicas)} stages")
    if min(depths) < 1:
        raise InvalidInput(f"a stage runs at least one forward ahead, not {min(depths)}")
    capped = tuple(
        min(depth, -(-num_microbatches // count))
        for depth, count in zip(depths, replicas, strict=True)
    )
    ahead = [depth * count for depth, count in zip(capped, replicas, strict=True)]
    for stage in range(1, len(capped)):
        front = min(range(stage), key=ahead.__getitem__)
        wanted = (capped[stage] - 1) * replicas[stage]
        if wanted >= ahead[front]:
            raise InvalidInput(
                f"stages {front} and {stage} would deadlock: stage {stage} needs {wanted + 1} "
                f"micro-batches before its first backward, but stage {front} sends only "
                f"{ahead[front]} before it waits for one; give stage {front} a depth of at least "
                f"{wanted // replicas[front] + 1}, or stage {stage} a smaller one"
            )
    return capped
