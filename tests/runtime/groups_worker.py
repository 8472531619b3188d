"""One of three ranks whose pipelines are given a group; prints the sums that its groups make."""

from __future__ import annotations

import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from stagewright.runtime.groups import Groups


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    given = dist.new_group()
    if rank == 1:  # so that the ranks have made other numbers of groups before
        dist.new_group([1], use_local_synchronization=True)
    groups = Groups(given)
    found = {}
    for ranks, group in groups.of_sets([(1, 2), (0, 1), (0, 2)]).items():
        found[str(ranks)] = summed(rank, group)
    found["everyone"] = summed(rank, groups.everyone())
    groups.close()
    sys.stdout.write(json.dumps({"rank": rank, **found}) + "\n")
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


def summed(rank: int, group: dist.ProcessGroup) -> float:
    value = torch.tensor(10.0**rank)
    dist.all_reduce(value, group=group)
    return float(value)


if __name__ == "__main__":
    main()
