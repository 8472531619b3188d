"""Joining again after torchrun restarted the ranks, and one plan for those that came back.

A rank that is lost ends the others too (`RankFailed`), and torchrun starts the script again, with
as many ranks as there are now. All a script needs on top is here: a process group that holds
nothing of the attempt before, a plan for the number of ranks, the same on each, and something to
do for ranks that the plan has no use for.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from ..core.errors import Infeasible, InvalidInput, RankFailed, StagewrightError
from ..core.plan.plan import Plan
from ..schedules.plan_schedule import schedule_of
from .ranks.process_groups import DEFAULT_TIMEOUT_S, group_timeout, init_process_group

PREFIX = "stagewright-elastic"
FINISHED = f"{PREFIX}/finished"
SPARE_INTERVAL_S = 0.5


def join(*, backend: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """``torch.distributed.init_process_group`` in a script that torchrun restarts.

    torchrun keeps one store over all attempts, and what the ranks of the last attempt left there
    (their addresses, above all) would be taken for that of the present ones. So each attempt has
    keys of its own, or, between several launchers, a store of its own.

    Args:
        backend: ``nccl`` where there are GPUs, ``gloo`` elsewhere, unless given.
        timeout_s: How long a rank waits for another before it asks who is missing.

    Raises:
        InvalidInput: Several launchers share one store, though each counts its own restarts.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        init_process_group(backend=backend, timeout_s=timeout_s)
        return
    launchers = int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    if launchers > 1:
        raise InvalidInput(
            f"{launchers} launchers share one store, and would mistake the ranks of an earlier "
            "attempt for the present ones; start each torchrun with --rdzv-backend=c10d and with "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment"
        )
    timeout = timedelta(seconds=timeout_s)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    shared = TCPStore(address, port, is_master=False, timeout=timeout)
    dist.init_process_group(
        backend or ("nccl" if torch.cuda.is_available() else "gloo"),
        store=PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", shared),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timeout,
    )


def plan_for_world(
    plan_for: Callable[[int], Plan], *, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Plan:
    """A plan for as many devices as there are ranks, made by rank 0 and the same on all.

    Args:
        plan_for: From the number of devices to a plan, such as
            ``lambda count: stagewright.plan(profile, f"{count}x24GB", options)``. Only rank 0
            calls it; the plan may use fewer devices.
        timeout_s: How long the other ranks wait for rank 0.

    Raises:
        Infeasible: There is no plan for so few devices; every rank raises it.
        InvalidInput: ``plan_for`` refused its profile or options, or its plan uses more devices
            than there are ranks; every rank raises it.
        RankFailed: Rank 0 ended or took longer than the timeout.
    """
    rank, store = dist.get_rank(), distributed_c10d._get_default_store()
    key = f"{PREFIX}/plan {store.add(f'{PREFIX}/plans of rank {rank}', 1)}"
    if rank != 0:
        return _received(store, key, timeout_s)
    try:
        plan = _checked(plan_for(dist.get_world_size()))
    except StagewrightError as error:
        store.set(key, _as_text(error))
        raise
    store.set(key, json.dumps({"plan": plan.to_json()}))
    return plan


def group_for(plan: Plan) -> dist.ProcessGroup | None:
    """The ranks that a plan uses, the first ones; every rank calls it.

    Returns:
        The group for `DistributedPipeline`; `None` on a rank that is spare, see `wait_as_spare`.
    """
    used = ranks_of(plan)
    if used == dist.get_world_size():
        return dist.group.WORLD
    group: dist.ProcessGroup = dist.new_group(range(used), timeout=group_timeout(None))
    return group if dist.get_rank() < used else None


def ranks_of(plan: Plan) -> int:
    """How many ranks run a plan."""
    return len(schedule_of(plan).ranks)


def wait_as_spare() -> None:
    """Stay until the others have finished: a rank that left could not take part in a restart.

    Raises:
        RankFailed: The others are gone without having finished.
    """
    store, rank = distributed_c10d._get_default_store(), dist.get_rank()
    try:
        while not store.check([FINISHED]):
            time.sleep(SPARE_INTERVAL_S)
        store.set(_left(rank), "1")
    except RuntimeError as error:
        raise RankFailed(
            f"rank {rank} was spare and waited; the ranks that train are gone ({error})"
        ) from error


def release_spares(plan: Plan, *, timeout_s: float = 60.0) -> None:
    """Let the spare ranks end; the ranks that train call it when all of them have finished.

    Rank 0 may host the store that spare ranks look at, so it stays until they have seen it. A
    spare rank that is lost meanwhile is not waited for beyond the timeout.
    """
    spares = [_left(rank) for rank in range(ranks_of(plan), dist.get_world_size())]
    if dist.get_rank() != 0 or not spares:
        return
    store = distributed_c10d._get_default_store()
    store.set(FINISHED, "1")
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and not store.check(spares):
        time.sleep(SPARE_INTERVAL_S / 5)


def _left(rank: int) -> str:
    return f"{PREFIX}/spare rank {rank} left"


def _checked(plan: Plan) -> Plan:
    wanted, there = ranks_of(plan), dist.get_world_size()
    if wanted > there:
        raise InvalidInput(
            f"the plan made for {there} devices uses {wanted}; plan for the number that is given"
        )
    return plan


def _as_text(error: StagewrightError) -> str:
    constraint = error.constraint if isinstance(error, Infeasible) else None
    return json.dumps({"error": str(error), "constraint": constraint})


def _received(store: Store, key: str, timeout_s: float) -> Plan:
    """What rank 0 made of it: its plan, or its error."""
    try:
        store.wait([key], timedelta(seconds=timeout_s))
        answer = json.loads(store.get(key))
    except RuntimeError as error:
        raise RankFailed(
            f"rank 0 was planning and gave no plan within {timeout_s:g} s ({error}); "
            "allow more time, or plan with a deadline",
            ranks=(0,),
        ) from error
    if "plan" in answer:
        return Plan.from_json(answer["plan"])
    if answer["constraint"] is not None:
        raise Infeasible(answer["error"], constraint=answer["constraint"])
    raise InvalidInput(answer["error"])
