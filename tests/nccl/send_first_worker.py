"""Two ranks exchange a tensor, both sending first or in turn; gloo lets either pass."""

from __future__ import annotations

import functools
import sys

import torch
import torch.distributed as dist

from stagewright.runtime.ranks.process_groups import init_process_group
from tests.runtime.forked import run_forked


def exchange(order: str) -> None:
    """Send to the other rank and receive from it; with ``turns`` the second receives first."""
    init_process_group(backend="gloo", timeout_s=60)
    rank = dist.get_rank()
    mine, theirs = torch.full((4,), float(rank)), torch.empty(4)
    steps = [lambda: dist.isend(mine, 1 - rank), lambda: dist.irecv(theirs, 1 - rank)]
    if order == "turns" and rank == 1:
        steps.reverse()
    for work in [step() for step in steps]:
        work.wait()
    assert theirs.tolist() == [1.0 - rank] * 4
    dist.destroy_process_group()


if __name__ == "__main__":
    run_forked(2, functools.partial(exchange, sys.argv[1]))
