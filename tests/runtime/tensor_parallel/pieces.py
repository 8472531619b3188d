"""A rank's part of a tensor, cut by indices written out one by one."""

import torch


def cut_by_hand(
    whole: torch.Tensor, dim: int, parts: tuple[int, ...], shard: int, degree: int
) -> torch.Tensor:
    chosen = []
    begin = 0
    for size in parts or (whole.shape[dim],):
        each = size // degree
        chosen += [begin + shard * each + at for at in range(each)]
        begin += size
    return whole.index_select(dim, torch.tensor(chosen)).clone()
