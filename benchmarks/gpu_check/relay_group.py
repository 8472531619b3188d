"""A process group that carries tensors of a GPU through the CPU, by gloo.

NCCL refuses two ranks on one GPU, and gloo sends no tensors of GPUs. Here every tensor is copied to
the CPU before it is sent, and to its device once it has arrived. So several ranks can share a GPU:
slowly, but with the order of work, the streams and the memory that they have on GPUs of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from stagewright.runtime.ranks import device_placement, process_groups

BACKEND = "relay"


class RelayedWork(dist._Work):
    """An operation on copies in the CPU's memory; `wait` copies what arrived to its device."""

    def __init__(self, inner: Any, arriving: Sequence[tuple[Tensor, Tensor]], kept: Any) -> None:
        super().__init__()
        self._inner, self._arriving = inner, list(arriving)
        self._kept = kept  # alive while gloo reads it

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._inner.wait()
        while self._arriving:
            tensor, copy = self._arriving.pop()
            tensor.copy_(copy)
        return True

    def is_completed(self) -> bool:
        # What is still to be copied has not arrived.
        return not self._arriving and bool(self._inner.is_completed())

    def result(self) -> Any:
        self.wait()
        return self._inner.result()


class RelayGroup(dist.ProcessGroup):
    """See the module: messages, and the collectives that a pipeline and torch's schedules use."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._inner = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._inner)
        self._name = "0"

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        # torch sets no names on groups that are whole backends of their own.
        self._name = distributed_c10d._world.pg_names.get(self, self._name)
        return self._name

    def _get_backend(self, device: torch.device) -> Any:
        return self._inner

    def abort(self) -> None:
        """Nothing waits on a device here: gloo ends with its connections."""

    def shutdown(self) -> None:
        self.abort()

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> RelayedWork:
        copies = [_copy(tensor) for tensor in tensors]
        return RelayedWork(self._inner.send(copies, peer, tag), (), copies)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> RelayedWork:
        copies = [_empty(tensor) for tensor in tensors]
        work = self._inner.recv(copies, peer, tag)
        return RelayedWork(work, list(zip(tensors, copies, strict=True)), copies)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> RelayedWork:
        return self._in_place(self._inner.broadcast, tensors, opts)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> RelayedWork:
        return self._in_place(self._inner.allreduce, tensors, opts)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any
    ) -> RelayedWork:
        copies = [_copy(tensor) for tensor in inputs]
        gathered = [[_empty(tensor) for tensor in tensors] for tensors in outputs]
        work = self._inner.allgather(gathered, copies, opts)
        pairs = [
            pair
            for tensors, arrived in zip(outputs, gathered, strict=True)
            for pair in zip(tensors, arrived, strict=True)
        ]
        return RelayedWork(work, pairs, copies)

    def barrier(self, opts: Any) -> Any:
        return self._inner.barrier(opts)

    def _in_place(self, operation: Any, tensors: list[Tensor], opts: Any) -> RelayedWork:
        copies = [_copy(tensor) for tensor in tensors]
        return RelayedWork(operation(copies, opts), list(zip(tensors, copies, strict=True)), copies)


def _copy(tensor: Tensor) -> Tensor:
    # A copy to memory that is not pinned ends only once the stream has made the tensor.
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def register() -> None:
    """Make the backend known to ``torch.distributed``."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, RelayGroup, devices=["cpu", "cuda"])


@contextlib.contextmanager
def taken_for_nccl(device: torch.device) -> Iterator[None]:
    """Let a pipeline believe that groups carry tensors of GPUs, as these do."""
    if device.type != "cuda":
        yield
        return
    with contextlib.ExitStack() as stack:
        for module in (device_placement, process_groups):
            stack.enter_context(mock.patch.object(module, "uses_nccl", return_value=True))
        yield
