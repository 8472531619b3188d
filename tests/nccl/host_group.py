"""A process group over gloo in a job of NCCL: its operations make the host wait."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.nccl.launch_log import LOG
from tests.nccl.launches import HostMeeting, Queue

HOST_BACKEND = "host_manners"


class GlooWrapper(dist.ProcessGroup):
    """Process group whose operations an inner one over gloo carries out."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._inner = dist.ProcessGroupGloo(store, rank, size, timeout)
        # What torch's C++ starts itself (DDP's buckets, FSDP's shards) goes past the log: torch
        # orders those on streams of its own.
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self._inner)
        self._name = "0"

    @property
    def group_name(self) -> str:
        # torch sets no names on groups that are whole backends of their own, and forgets them when
        # it destroys a group.
        self._name = distributed_c10d._world.pg_names.get(self, self._name)
        return self._name

    def _get_backend(self, device: torch.device) -> Any:
        return self._inner

    def _ranks(self) -> list[int]:
        if dist.group.WORLD is self or dist.group.WORLD is None:
            return list(range(self.size()))
        return dist.get_process_group_ranks(self)


class HostWork(dist._Work):
    """An operation of gloo, whose ranks meet where the host waits for it."""

    def __init__(self, meeting: HostMeeting, inner: Any) -> None:
        super().__init__()
        self._meeting, self._inner = meeting, inner

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._inner.wait(*() if timeout is None else (timeout,))
        LOG.add(self._meeting)  # an operation that failed was no meeting
        return True

    def is_completed(self) -> bool:
        return bool(self._inner.is_completed())

    def get_future(self) -> Any:
        return self._inner.get_future()


class HostGroup(GlooWrapper):
    """Process group that logs where hosts wait for each other."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, size, timeout)
        self._counts: Counter[Queue] = Counter()
        self._lock = threading.Lock()

    def getBackendName(self) -> str:
        return HOST_BACKEND

    def _meeting(self, what: str, ranks: Sequence[int]) -> HostMeeting:
        """Return the next of its kind; each rank counts for itself, and they agree."""
        kind = (f"group {self.group_name}", what)
        with self._lock:
            self._counts[kind] += 1
            return HostMeeting((*kind, f"number {self._counts[kind]}"), tuple(ranks))

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> HostWork:
        mine, theirs = self._ranks()[self.rank()], self._ranks()[peer]
        meeting = self._meeting(f"gloo message {mine} to {theirs}", (mine, theirs))
        return HostWork(meeting, self._inner.send(tensors, peer, tag))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> HostWork:
        mine, theirs = self._ranks()[self.rank()], self._ranks()[peer]
        meeting = self._meeting(f"gloo message {theirs} to {mine}", (theirs, mine))
        return HostWork(meeting, self._inner.recv(tensors, peer, tag))


def _add_collective(name: str) -> None:
    def run(self: HostGroup, *arguments: Any, **options: Any) -> HostWork:
        meeting = self._meeting("gloo collective", self._ranks())
        return HostWork(meeting, getattr(self._inner, name)(*arguments, **options))

    setattr(HostGroup, name, run)


_COLLECTIVES: tuple[str, ...] = (
    "barrier", "allreduce", "allgather", "_allgather_base", "broadcast", "gather", "scatter",
    "reduce", "reduce_scatter", "alltoall", "alltoall_base",
)  # fmt: skip

for _name in _COLLECTIVES:
    _add_collective(_name)
