"""What ranks that hold the same do together."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Work(Protocol):
    """Something under way."""

    def wait(self) -> Any: ...


class Collective(Protocol):
    """Several ranks; all of them call the same methods in the same order, and wait afterwards."""

    def sum(self, tensor: Tensor) -> Work:
        """Put the sum over the ranks in place of the tensor."""

    def gather(self, tensor: Tensor) -> tuple[list[Tensor], Work]:
        """Every rank's tensor, all of one shape and dtype."""


class GroupCollective:
    """The ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._size = dist.get_world_size(group)

    def sum(self, tensor: Tensor) -> Work:
        work: Work = dist.all_reduce(tensor, group=self._group, async_op=True)
        return work

    def gather(self, tensor: Tensor) -> tuple[list[Tensor], Work]:
        found = [torch.empty_like(tensor) for _ in range(self._size)]
        work: Work = dist.all_gather(found, tensor, group=self._group, async_op=True)
        return found, work
