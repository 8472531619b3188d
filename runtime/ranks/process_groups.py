"""Process groups of one pipeline's ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from ...capture.capture import default_device
from ...core.errors import InvalidInput, PlanMismatch
from ...core.plan.schedule import Schedule
from ...core.units import count

Ranks = tuple[int, ...]


class ProcessGroups:
    """Makes the groups a pipeline needs; all its ranks make the same ones in the same order.

    Args:
        group: The pipeline's ranks; the default group if `None`.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.global_ranks = [
            rank if group is None else dist.get_global_rank(group, rank)
            for rank in range(self.size)
        ]
        self._made: list[dist.ProcessGroup] = []
        self._is_level = group is None

    def everyone(self, backend: str | None = None) -> dist.ProcessGroup:
        """A group of its own for all ranks, beside the pipeline's; on its backend unless given."""
        made = self._new(range(self.size), backend)
        assert made is not None
        return made

    def of_sets(self, wanted: Iterable[Ranks]) -> dict[Ranks, dist.ProcessGroup]:
        """A group for each set of ranks that this one is in."""
        found = {}
        for ranks in sorted(set(wanted)):
            made = self._new(ranks)
            if made is not None:
                found[ranks] = made
        return found

    def close(self) -> None:
        """Destroy what was made, unless all groups have been destroyed already."""
        while self._made:
            made = self._made.pop()
            if dist.is_initialized():
                dist.destroy_process_group(made)

    def _new(self, ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup | None:
        """A new group; `None` where this rank is not in it."""
        if self._group is not None and backend is None and is_bound_to_devices():
            raise InvalidInput(
                "group= does not go with ranks that are bound to their devices: torch would wait "
                "for all ranks there are to make each group of some; call init_process_group "
                "without device_id"
            )
        if not self._is_level:
            self._level()
        if self._group is not None and self.rank not in ranks:
            self._fill()
            return None
        made: dist.ProcessGroup = dist.new_group(
            [self.global_ranks[rank] for rank in ranks],
            timeout=group_timeout(self._group),
            backend=backend,
            # Ranks outside the pipeline do not take part, so its members settle it themselves.
            use_local_synchronization=self._group is not None,
        )
        if self.rank not in ranks:
            return None
        self._made.append(made)
        return made

    def _level(self) -> None:
        """Let all ranks have as many groups.

        torch names a group that its members alone make by their ranks and by how many groups the
        process has. Members with other numbers would look for each other under other names, until
        the timeout, so a rank that is not in a group makes one of its own meanwhile.
        """
        self._is_level = True
        own = len(distributed_c10d._world.pg_names)
        counts = [own] * self.size
        dist.all_gather_object(counts, own, group=self._group)
        for _ in range(max(counts) - own):
            self._fill()

    def _fill(self) -> None:
        """A group of this rank alone."""
        alone = [self.global_ranks[self.rank]]
        self._made.append(dist.new_group(alone, backend="gloo", use_local_synchronization=True))


def is_bound_to_devices() -> bool:
    """Whether ranks were bound to their devices when they met."""
    return dist.group.WORLD is not None and dist.group.WORLD.bound_device_id is not None


def group_timeout(group: dist.ProcessGroup | None) -> timedelta | None:
    """How long a group waits for a rank; torch gives new groups its own half hour instead."""
    whole: Any = group or dist.group.WORLD
    kind = "cuda" if "nccl" in dist.get_backend(group) else "cpu"
    options = whole._get_backend(torch.device(kind)).options
    found: timedelta | None = getattr(options, "_timeout", None)
    return found


DEFAULT_TIMEOUT_S = 300.0


def init_process_group(*, backend: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """``torch.distributed.init_process_group`` from torchrun's variables, with a timeout.

    In a job that torchrun restarts use `runtime.elastic.join`: torch's store keeps the keys of the
    attempt before.

    Args:
        backend: ``nccl`` where there are GPUs, ``gloo`` elsewhere, unless given.
        timeout_s: How long a rank waits for another before it asks who is missing.
    """
    chosen = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    dist.init_process_group(chosen, timeout=timedelta(seconds=timeout_s))


def end_process(code: int = 0) -> NoReturn:
    """End this process at once, with what it has printed.

    For the end of a script that lost a rank. At a normal exit gloo takes its connections apart,
    and one whose other end is gone may wait for it, or abort the process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def check_world(schedule: Schedule, group: dist.ProcessGroup | None) -> None:
    """See that there is a process group, with a rank for every device of the schedule.

    Raises:
        InvalidInput: ``torch.distributed`` is not initialised.
        PlanMismatch: There are more ranks or fewer.
    """
    wanted = len(schedule.ranks)
    if not dist.is_initialized():
        raise InvalidInput(
            "call torch.distributed.init_process_group first, and start one process a device: "
            f"torchrun --nproc-per-node {wanted} train.py"
        )
    ranks = dist.get_world_size(group)
    if ranks != wanted:
        raise PlanMismatch(
            f"the plan has {count(schedule.num_stages, 'stage')} on {count(wanted, 'device')}, "
            f"but {count(ranks, 'rank')} started; start {wanted}, or plan for "
            f"{count(ranks, 'device')}"
        )


def choose_device(model: nn.Module, group: dist.ProcessGroup | None) -> torch.device:
    """Where a model is; one on the meta device goes where its ranks' messages are."""
    device = default_device(model)
    if device.type != "meta":
        return device
    on_gpu = "nccl" in dist.get_backend(group)
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
