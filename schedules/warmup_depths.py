"""How many forwards a stage runs ahead of its first backward."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.errors import InvalidInput


def default_depths(
    num_microbatches: int, replicas: Sequence[int], extra: Sequence[int] = ()
) -> tuple[int, ...]:
    """1F1B's own warm-up: forwards each replica of a stage does before its first backward.

    A stage with depth d on r ranks has D = d r micro-batches between their forward and their
    backward. To keep the next stage busy a stage has to run its D' ahead and one round of its
    own: d = 1 + ceil(D' / r), from the last stage's d = 1 on, and never more than the n
    micro-batches a replica gets. With one rank a stage this is min(m, S - s) (PipeDream-Flush,
    Narayanan et al. 2021). PipeDream's rule for replicas, ceil(ranks from here on / r)
    (Narayanan et al. 2019), rounds every stage apart: where replicas do not divide each other
    that starves stages, by half of the step and more in `benchmarks/planner.py`'s plans.

    Args:
        num_microbatches: Of one step.
        replicas: Ranks of each stage.
        extra: Added for each stage; nothing if empty.
    """
    depths: list[int] = []
    ahead = 0
    more = extra or (0,) * len(replicas)
    for count, added in zip(reversed(replicas), reversed(more), strict=True):
        depth = 1 + -(-ahead // count)
        ahead = depth * count
        depths.append(min(depth + added, -(-num_microbatches // count)))
    return tuple(reversed(depths))


def checked_depths(
    num_microbatches: int, replicas: Sequence[int], depths: Sequence[int]
) -> tuple[int, ...]:
    """Depths a caller chose, none above the micro-batches a replica gets.

    Stage t begins the backward of micro-batch k after the forward of k + (d_t - 1) r_t. For that
    one a stage s in front needs the backward of k + (d_t - 1) r_t - d_s r_s. So the step finishes
    if (d_t - 1) r_t < d_s r_s for all s < t: then every backward waits for earlier ones alone.

    Raises:
        InvalidInput: Not one depth of at least 1 for every stage, or the condition fails.
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
                f"stage {stage} wants {wanted + 1} micro-batches before its first backward, but "
                f"stage {front} makes only {ahead[front]} before it waits for one, so both would "
                f"wait for ever; give stage {front} a depth of at least "
                f"{wanted // replicas[front] + 1}, or stage {stage} a smaller one"
            )
    return capped
