"""Collective operations on a set of ranks."""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Pending(Protocol):
    """A collective operation under way."""

    def wait(self) -> Any: ...


class Collective(Protocol):
    """A set of ranks, all of which make the same calls in the same order and wait for them later.

    Implemented over process groups, and by ranks emulated in one process.
    """

    def sum(self, tensor: Tensor) -> Pending:
        """Begin to replace a tensor by its sum over the ranks."""

    def gather(self, tensor: Tensor) -> tuple[list[Tensor], Pending]:
        """Begin to gather the tensors of all ranks, of equal shape and dtype."""


class GroupCollective:
    """The ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._size = dist.get_world_size(group)

    def sum(self, tensor: Tensor) -> Pending:
        pending: Pending = dist.all_reduce(tensor, group=self._group, async_op=True)
        return pending

    def gather(self, tensor: Tensor) -> tuple[list[Tensor], Pending]:
        found = [torch.empty_like(tensor) for _ in range(self._size)]
        pending: Pending = dist.all_gather(found, tensor, group=self._group, async_op=True)
        return found, pending
