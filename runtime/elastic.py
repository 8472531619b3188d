"""Elastic training: rejoining after torchrun restarted the ranks, and planning for those left.

A lost rank ends the others too (`RankFailed`), and torchrun restarts the script with the ranks
that are available. A script then needs a process group without traces of the earlier attempt, one
plan for the present number of ranks, and something to do for ranks that the plan does not use.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import groupby

import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from ..core.cluster.cluster import Cluster
from ..core.cluster.places import list_groups
from ..core.errors import InvalidInput, RankFailed, StagewrightError
from ..core.plan.plan import Plan
from ..schedules.plan_schedule import schedule_of
from .ranks.process_groups import (
    DEFAULT_TIMEOUT_S,
    choose_backend,
    group_timeout,
    init_process_group,
)

PREFIX = "stagewright-elastic"
FINISHED = f"{PREFIX}/finished"
SPARE_INTERVAL_S = 0.5


def join(*, backend: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Call ``torch.distributed.init_process_group`` in a script that torchrun restarts.

    torchrun keeps one store over all attempts. What ranks of an earlier attempt left in it, above
    all their addresses, would be taken for that of the present ones. So each attempt uses its own
    key prefix or, with several launchers, its own store.

    Args:
        backend: By default ``nccl`` where there are GPUs and ``gloo`` elsewhere.
        timeout_s: How long a rank waits for another before the missing one is determined.

    Raises:
        InvalidInput: Several launchers share one store, though each counts its own restarts, or
            this machine has fewer GPUs than processes.
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
    # The agent's store outlives restarts; the prefix separates this attempt's keys in it.
    timeout = timedelta(seconds=timeout_s)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    shared = TCPStore(address, port, is_master=False, timeout=timeout)
    dist.init_process_group(
        choose_backend(backend),
        store=PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", shared),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timeout,
    )


def plan_for_world(
    plan_for: Callable[[int], Plan], *, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Plan:
    """Return a plan for the present number of ranks, made by rank 0 and sent to all.

    Args:
        plan_for: Maps a number of devices to a plan, such as
            ``lambda count: stagewright.plan(profile, f"{count}x24GB", options)``. Only rank 0
            calls it. The plan may use fewer devices.
        timeout_s: How long the other ranks wait for rank 0.

    Raises:
        Infeasible: No plan fits this number of devices; raised on every rank.
        InvalidInput: ``plan_for`` raised it, or its plan uses more devices than there are ranks;
            raised on every rank.
        RankFailed: Rank 0 ended or took longer than the timeout.
    """
    rank, store = dist.get_rank(), distributed_c10d._get_default_store()
    # Numbered, so that a second call does not read the first one's plan.
    key = f"{PREFIX}/plan {store.add(f'{PREFIX}/plans of rank {rank}', 1)}"
    if rank != 0:
        return _receive_plan(store, key, timeout_s)
    try:
        there = dist.get_world_size()
        plan = plan_for(there)
        if ranks_of(plan) > there:
            raise InvalidInput(
                f"the plan made for {there} devices uses {ranks_of(plan)}; plan for the number "
                "passed"
            )
    except StagewrightError as error:
        store.set(key, json.dumps({"error": error.to_record().as_dict}))
        raise
    store.set(key, json.dumps({"plan": plan.to_json()}))
    return plan


def cluster_of_world(
    whole: Cluster, *, host: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Cluster:
    """Return the devices of the ranks that are left, each in its place; called on every rank.

    The first host, in the order of the ranks, is the first innermost group of ``whole``, and so
    on; a host with fewer ranks than its group has devices is taken to have lost the last ones.
    Device r is that of rank r; `move_ranks` has them follow a plan.

    Args:
        whole: The cluster with nothing lost.
        host: This rank's host; its name by default.
        timeout_s: How long a rank waits for the others.

    Raises:
        InvalidInput: There are more hosts than groups, or more ranks on one than devices, or the
            ranks of a host do not follow each other.
        RankFailed: A rank did not say where it is.
    """
    rank, store = dist.get_rank(), distributed_c10d._get_default_store()
    keys = [f"{PREFIX}/host of rank {other}" for other in range(dist.get_world_size())]
    store.set(keys[rank], host or socket.gethostname())
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise RankFailed(f"a rank named no host within {timeout_s:g} s ({error})") from error
    runs = [(name, len(list(run))) for name, run in groupby(map(store.get, keys))]
    if len({name for name, _ in runs}) < len(runs):
        raise InvalidInput("the ranks of a host do not follow each other")
    if len(whole.levels) < 2:  # one link joins all: any device is as good
        return whole.without(*range(len(keys), len(whole.devices)))
    numbers = list_groups(whole)[0]
    groups = [list(group) for _, group in groupby(range(len(numbers)), key=numbers.__getitem__)]
    if len(runs) > len(groups):
        raise InvalidInput(f"{len(runs)} hosts have ranks; the cluster has {len(groups)}")
    left: list[int] = []
    for (name, count), group in zip(runs, groups, strict=False):
        if count > len(group):
            raise InvalidInput(
                f"host {name.decode()} has {count} ranks; the cluster has {len(group)} devices "
                "there"
            )
        left += group[:count]
    return whole.without(*(set(range(len(numbers))) - set(left)))


def move_ranks(plan: Plan, cluster: Cluster) -> None:
    """Give the ranks numbers in the order of the plan's devices; called on every rank.

    A pipeline takes ranks stage by stage, whatever the names of the devices. Spare ranks come
    last. The default process group is made again; make no other group before. The plan was made
    for the cluster, whose device r is that of rank r, as from `cluster_of_world`.

    Raises:
        InvalidInput: The plan is for other devices, or there are not as many as ranks.
    """
    names = [device.name for device in cluster.devices]
    used = dict.fromkeys(name for stage in plan.stages for name in stage.devices)
    if len(names) != dist.get_world_size() or not used.keys() <= set(names):
        raise InvalidInput(
            f"the plan or its cluster of {len(names)} devices is not that of the "
            f"{dist.get_world_size()} ranks; plan for `cluster_of_world`"
        )
    order = list(dict.fromkeys([*used, *names]))
    if order == names:
        return
    rank, store = dist.get_rank(), distributed_c10d._get_default_store()
    backend, timeout = dist.get_backend(), group_timeout(None)
    dist.destroy_process_group()
    dist.init_process_group(
        backend,
        store=PrefixStore(f"{PREFIX}/moved", store),
        rank=order.index(names[rank]),
        world_size=len(names),
        timeout=timeout,
    )


def group_for(plan: Plan) -> dist.ProcessGroup | None:
    """Create the group of the first ranks, which the plan uses; called on every rank.

    Returns:
        The group for `DistributedPipeline`; `None` on a spare rank, see `wait_as_spare`.
    """
    used = ranks_of(plan)
    if used == dist.get_world_size():
        return dist.group.WORLD
    group: dist.ProcessGroup = dist.new_group(range(used), timeout=group_timeout(None))
    return group if dist.get_rank() < used else None


def ranks_of(plan: Plan) -> int:
    """Return the number of ranks that a plan uses."""
    return len(schedule_of(plan).ranks)


def wait_as_spare() -> None:
    """Wait until the other ranks have finished; a rank that left could not join a restart.

    Raises:
        RankFailed: The others ended without having finished.
    """
    store, rank = distributed_c10d._get_default_store(), dist.get_rank()
    try:
        while not store.check([FINISHED]):
            time.sleep(SPARE_INTERVAL_S)
        store.set(_left(rank), "1")
    except RuntimeError as error:
        raise RankFailed(
            f"rank {rank} was waiting as a spare; the training ranks are gone ({error})"
        ) from error


def release_spares(plan: Plan, *, timeout_s: float = 60.0) -> None:
    """Release the spare ranks; called on training ranks once all of them have finished.

    Rank 0 may host the store that spare ranks poll, so it waits until they have seen the message,
    or until the timeout if one of them was lost.
    """
    spares = [_left(rank) for rank in range(ranks_of(plan), dist.get_world_size())]
    if dist.get_rank() != 0 or not spares:
        return
    store = distributed_c10d._get_default_store()
    store.set(FINISHED, "1")
    deadline = time.monotonic() + timeout_s
    # Leaving at once could take the store along before a spare rank has polled it.
    while time.monotonic() < deadline and not store.check(spares):
        time.sleep(SPARE_INTERVAL_S / 5)


def _left(rank: int) -> str:
    return f"{PREFIX}/spare rank {rank} left"


def _receive_plan(store: Store, key: str, timeout_s: float) -> Plan:
    """Return rank 0's plan, or raise its error."""
    try:
        store.wait([key], timedelta(seconds=timeout_s))
        answer = json.loads(store.get(key))
    except RuntimeError as error:
        raise RankFailed(
            f"rank 0 sent no plan within {timeout_s:g} s ({error}); allow more time, or plan with "
            "a deadline",
            ranks=(0,),
        ) from error
    if "plan" in answer:
        return Plan.from_json(answer["plan"])
    raise StagewrightError.from_record(answer["error"])
