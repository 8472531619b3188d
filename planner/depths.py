"""How many forwards a stage runs ahead of its first backward."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from ..core.errors import InvalidInput


def default_depths(num_microbatches: int, replicas: Sequence[int]) -> tuple[int, ...]:
    """1F1B's own warm-up: min(n_s, ceil(R_s / r_s)) forwards on each replica of stage s.

    R_s are the ranks from this stage to the end, n_s = ceil(m / r_s) the micro-batches its first
    replica gets. With one rank a stage this is min(m, S - s) (PipeDream-Flush, Narayanan et al.
    2021); with replicas it is PipeDream's NOAM per stage (Narayanan et al. 2019).
    """
    to_the_end = list(accumulate(reversed(replicas)))[::-1]
    return tuple(
        min(-(-num_microbatches // count), -(-ranks // count))
        for count, ranks in zip(replicas, to_the_end, strict=True)
    )


def checked_depths(
    num_microbatches: int, replicas: Sequence[int], depths: Sequence[int]
) -> tuple[int, ...]:
    """Depths a caller chose, none above the micro-batches a replica gets.

    A replica of stage s + 1 that wants all its d_{s+1} first micro-batches waits for micro-batch
    (d_{s+1} - 1) r_{s+1} or a later one of its round; stage s makes d_s r_s before it wants a
    gradient back. So (d_{s+1} - 1) r_{s+1} < d_s r_s for all s is enough to finish.

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
    for stage, (sender, receiver) in enumerate(pairwise(zip(capped, replicas, strict=True))):
        (made, senders), (wanted, receivers) = sender, receiver
        if (wanted - 1) * receivers >= made * senders:
            raise InvalidInput(
                f"stage {stage} runs {made} forwards on each of {senders} ranks before it waits "
                f"for a backward; stage {stage + 1} wants {wanted} on each of {receivers} first, "
                f"so both would wait for ever; give stage {stage} a depth of at least "
                f"{(wanted - 1) * receivers // senders + 1}, or stage {stage + 1} a smaller one"
            )
    return capped
