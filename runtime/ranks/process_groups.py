"""Process groups of a pipeline: creation, timeouts and checks of the number of ranks."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ...core.errors import InvalidInput, PlanMismatch
from ...core.plan.plan import Plan
from ...core.units import count
from ...schedules.plan_schedule import count_ranks
from .device_placement import check_connections, prepare_cuda, take_gpu, uses_nccl

WATCHDOG = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT")

RankSet = tuple[int, ...]
"""Ranks of a pipeline, ascending."""


class ProcessGroups:
    """Factory of the groups that a pipeline on some ranks, or on the default group, needs.

    Every rank of the pipeline must ask for the same groups in the same order.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.global_ranks = [
            rank if group is None else dist.get_global_rank(group, rank)
            for rank in range(self.size)
        ]
        self._created: list[dist.ProcessGroup] = []
        self._number: int | None = None

    def create_group_of_all(self, backend: str | None = None) -> dist.ProcessGroup:
        """Create another group of all ranks, on the pipeline's backend unless one is given."""
        created = self._create(range(self.size), backend)
        assert created is not None
        return created

    def create_groups(self, wanted: Iterable[RankSet]) -> dict[RankSet, dist.ProcessGroup]:
        """Create a group for each set of ranks; return those that include this rank."""
        found = {}
        for ranks in sorted(set(wanted)):  # creation is collective: in one order on all ranks
            created = self._create(ranks)
            if created is not None:
                found[ranks] = created
        return found

    def close(self) -> None:
        """Destroy the groups created here, unless all groups have been destroyed already."""
        while self._created:
            created = self._created.pop()
            if dist.is_initialized():
                dist.destroy_process_group(created)

    def abort(self) -> None:
        """Abort the groups created here, so that streams stop waiting; their results are garbage.

        Each in a thread of its own: one abort may wait until another communicator's operations
        have ended (https://github.com/pytorch/pytorch/issues/119797).
        """
        threads = [threading.Thread(target=group.abort, daemon=True) for group in self._created]
        for thread in threads:
            thread.start()

    def _create(self, ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup | None:
        """Create a group; return `None` on a rank outside it."""
        if self._group is not None and backend is None and is_bound_to_devices():
            raise InvalidInput(
                "group= cannot be combined with ranks bound to their devices: torch would wait "
                "for all ranks of the job to create each group; call init_process_group without "
                "device_id"
            )
        number = 0 if self._group is None else self._next_number()  # by those outside, too
        if self._group is not None and self.rank not in ranks:
            return None
        with _watched_by_us(), _named(number):
            created: dist.ProcessGroup = dist.new_group(
                [self.global_ranks[rank] for rank in ranks],
                timeout=group_timeout(self._group),
                backend=backend,
                # Ranks outside the pipeline make no such call, so members must not wait for them.
                use_local_synchronization=self._group is not None,
            )
        if self.rank not in ranks:
            return None
        self._created.append(created)
        return created

    def _next_number(self) -> int:
        """Return the next of the numbers that this pipeline's ranks count in step.

        The first is above all that any of them has used in its life.
        """
        global _last_number
        if self._number is None:
            used = [_last_number] * self.size
            dist.all_gather_object(used, _last_number, group=self._group)
            self._number = max(used)
        self._number += 1
        _last_number = self._number
        return self._number


_last_number = 0
"""The highest number in the names of groups that this process took part in."""


@contextmanager
def _named(number: int) -> Iterator[None]:
    """Let torch name a group made inside by its ranks and a number.

    With ``use_local_synchronization`` torch names it by its ranks and by how many groups the
    process has. Members that have different numbers would look for each other under different
    names. And after some were destroyed a name comes again, under which the store still has the
    addresses of the destroyed group.
    """

    def hash_ranks(ranks: Sequence[int]) -> str:
        return hashlib.sha1(f"{list(ranks)} {number}".encode(), usedforsecurity=False).hexdigest()

    own = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = hash_ranks
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = own


@contextmanager
def _watched_by_us() -> Iterator[None]:
    """Keep torch from ending the process when an operation of a group made inside fails.

    By default torch's own watchdog raises in a thread of its own, which ends the process before an
    error can name the rank. `CommunicatorWatcher` does that work. torch reads the variables
    whenever it makes a group; torchrun sets the first.
    """
    before = {name: os.environ.get(name) for name in WATCHDOG}
    os.environ.update(dict.fromkeys(WATCHDOG, "0"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def is_bound_to_devices() -> bool:
    """Return True if ``init_process_group`` was given a ``device_id``."""
    return dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is not None


def group_timeout(group: dist.ProcessGroup | None) -> timedelta | None:
    """Return how long a group waits for a rank; `None` if its backend does not say.

    New groups are given it: torch would give them its default of 30 minutes (10 for NCCL).
    """
    whole: Any = group or dist.group.WORLD
    kind = "cuda" if uses_nccl(group) else "cpu"
    options = whole._get_backend(torch.device(kind)).options
    found: timedelta | None = getattr(options, "_timeout", None)
    return found


DEFAULT_TIMEOUT_S = 300.0
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What torchrun sets, and torch's ``env://`` reads."""


def init_process_group(*, backend: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Call ``torch.distributed.init_process_group`` with torchrun's variables and a timeout.

    With NCCL each process takes the GPU of its ``LOCAL_RANK``. In a job that torchrun restarts use
    `runtime.elastic.join`: torch's store keeps the keys of earlier attempts.

    Args:
        backend: By default ``nccl`` where there are GPUs and ``gloo`` elsewhere.
        timeout_s: How long a rank waits for another before the missing one is determined.

    Raises:
        InvalidInput: This machine has fewer GPUs than processes, or no launcher started this one.
    """
    missing = [name for name in LAUNCHER_VARIABLES if name not in os.environ]
    if missing and backend != "mpi":  # mpirun tells MPI itself
        raise InvalidInput(
            f"{', '.join(missing)} not set in the environment; start the script with a launcher, "
            "such as 'torchrun --nproc-per-node 2 train.py'"
        )
    dist.init_process_group(choose_backend(backend), timeout=timedelta(seconds=timeout_s))


def choose_backend(wanted: str | None) -> str:
    """Return the backend wanted, or the default one; for NCCL, take this process's GPU."""
    if wanted is None or "nccl" in wanted:
        prepare_cuda()  # first: to look for GPUs starts the driver
    chosen = wanted or ("nccl" if torch.cuda.is_available() else "gloo")
    if "nccl" in chosen:
        check_connections()
        take_gpu()
    return chosen


def end_process(code: int = 0) -> NoReturn:
    """Flush output and end this process at once.

    For scripts that lost a rank. At a normal exit gloo closes its connections, and one whose other
    end is gone may wait for it, or abort the process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def check_initialised(plan: Plan) -> None:
    """Check that there is a process group at all."""
    if not dist.is_initialized():
        raise InvalidInput(
            "call stagewright.init_process_group first, and start one process a device: "
            f"torchrun --nproc-per-node {count_ranks(plan)} train.py"
        )


def check_world(num_stages: int, num_devices: int, group: dist.ProcessGroup | None) -> None:
    """Check that the process group has one rank for every device of a plan."""
    ranks = dist.get_world_size(group)
    if ranks != num_devices:
        raise PlanMismatch(
            f"the plan has {count(num_stages, 'stage')} on {count(num_devices, 'device')}, "
            f"but {count(ranks, 'rank')} started; start {num_devices}, or plan for "
            f"{count(ranks, 'device')}"
        )
