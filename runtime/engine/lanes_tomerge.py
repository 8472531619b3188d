"""Which process group carries messages from one rank to another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from ..ranks.process_groups import Groups, is_bound

Pair = tuple[int, int]
"""Sender and receiver."""

Lanes = Mapping[Pair, dist.ProcessGroup]
"""The group of each pair that this rank is in."""


def lanes_of(ranks: Groups, pairs: Sequence[Pair]) -> Lanes:
    """Groups in which no message waits for one of another pair; called on every rank.

    Two groups of all ranks do, one to higher ranks and one to lower: gloo works on all messages at
    once, and NCCL sets up a stream for each pair of a group. Unless the ranks were bound to their
    devices when they met (``init_process_group(device_id=...)``): then all messages of a group go
    through one stream in the order in which they are posted, and a receive that is posted ahead
    stands in the way of a send it waits for. So each pair gets a group of its own.

    Args:
        ranks: Of the pipeline.
        pairs: Between which something is sent, the same on every rank.
    """
    if not pairs:
        return {}
    if not is_bound():
        upwards, downwards = ranks.everyone(), ranks.everyone()
        return {pair: upwards if pair[1] > pair[0] else downwards for pair in pairs}
    found: dict[Pair, dist.ProcessGroup] = {}
    for sender, receiver in sorted(pairs):
        both = (min(sender, receiver), max(sender, receiver))
        for group in ranks.of_sets([both]).values():
            found[sender, receiver] = group
    return found
