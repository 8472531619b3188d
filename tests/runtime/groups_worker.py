"""Three ranks whose pipelines are given a group; print the sums that their groups make."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from stagewright.runtime.ranks.process_groups import ProcessGroups
from tests.runtime.forked import print_line, run_forked


def one_rank() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    given = dist.new_group()
    if rank == 1:  # so that the ranks have made other numbers of groups before
        dist.new_group([1], use_local_synchronization=True)
    names = []
    for _ in range(2):  # once more after all were destroyed
        groups = ProcessGroups(given)
        found = {}
        for ranks, group in groups.create_groups([(1, 2), (0, 1), (0, 2)]).items():
            found[str(ranks)] = summed(rank, group)
            names.append(group.group_name)
        everyone = groups.create_group_of_all()
        found["everyone"] = summed(rank, everyone)
        names.append(everyone.group_name)
        groups.close()
    print_line({"rank": rank, "names": len(set(names)), **found})
    dist.barrier()
    dist.destroy_process_group()


def summed(rank: int, group: dist.ProcessGroup) -> float:
    value = torch.tensor(10.0**rank)
    dist.all_reduce(value, group=group)
    return float(value)


if __name__ == "__main__":
    run_forked(3, one_rank)
