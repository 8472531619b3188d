"""Start and end an RPC session: one process in control, all others serve.

A worker ends when the controller says so, or when it is gone; none is left behind.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed.rpc as rpc
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store

from ...core.errors import InvalidInput, RankFailed

CONTROLLER = "master"
DEFAULT_TIMEOUT_S = 300.0
LOOK_INTERVAL_S = 0.2
HEARD_TIMEOUT_S = 2.0

END = "end"
WELL = "well"


@contextmanager
def controller(
    world_size: int, address: str, *, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Iterator[None]:
    """Be the master (rank 0) while the workers serve; dismiss them at the end.

    Whatever the body raises ends the workers too, with a `RankFailed` that quotes it.

    Args:
        world_size: Processes in all, this one included.
        address: ``host:port`` of this process, free to listen at.
        timeout_s: Limit of every call: a backward pass over all stages is one.

    Raises:
        RankFailed: Not all processes came.
    """
    store = _join(CONTROLLER, 0, world_size, address, timeout_s)
    try:
        yield
    except BaseException as error:
        store.set(END, f"{type(error).__name__}: {error}")
        _wait_until_heard(store, world_size)
        rpc.shutdown(graceful=False)
        raise
    store.set(END, WELL)
    rpc.shutdown(timeout=timeout_s)


def serve(
    name: str, rank: int, world_size: int, address: str, *, timeout_s: float = DEFAULT_TIMEOUT_S
) -> None:
    """Be a passive worker: do what other processes of the session ask, until dismissed.

    Args:
        name: What the controller calls this process, such as ``worker1``.
        rank: From 1 up.
        world_size: Processes in all, the controller included.
        address: ``host:port`` of the controller.
        timeout_s: As the controller's.

    Raises:
        RankFailed: The controller gave up, or is gone.
    """
    if name == CONTROLLER or rank < 1:
        raise InvalidInput(f"{name!r} of rank {rank} is the controller's; workers count from 1")
    store = _join(name, rank, world_size, address, timeout_s)
    try:
        reason = _wait_for_end(store)
        store.set(f"heard/{rank}", "1")
    except RuntimeError:
        reason = f"the controller at {address} stopped answering"
    if reason != WELL:
        rpc.shutdown(graceful=False)
        raise RankFailed(f"{name} stops serving: {reason}", ranks=(0,))
    rpc.shutdown(timeout=timeout_s)


def _join(name: str, rank: int, world_size: int, address: str, timeout_s: float) -> Store:
    """Meet the others; a store of this session to say the end in.

    It is the store that RPC met by, which lives in the controller, and ends with it.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise InvalidInput(f"the address is {address!r}; give host:port, such as 10.0.0.1:29500")
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://{address}", rpc_timeout=timeout_s)
    try:
        rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
        store = TCPStore(
            host,
            int(port),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )
        number = store.add(f"stagewright-rpc/sessions of rank {rank}", 1)
        session = PrefixStore(f"stagewright-rpc/{number}", store)
        session.set(f"joined/{rank}", "1")
        if rank == 0:
            session.wait([f"joined/{other}" for other in range(world_size)])
    except RuntimeError as error:
        raise RankFailed(
            f"{name} did not meet the others at {address}: {str(error).strip()}. Start "
            f"{world_size} processes with this address and ranks from 0 to {world_size - 1}"
        ) from error
    return session


def _wait_for_end(store: Store) -> str:
    while not store.check([END]):
        time.sleep(LOOK_INTERVAL_S)
    return str(store.get(END), "utf-8")


def _wait_until_heard(store: Store, world_size: int) -> None:
    """Until all workers know the reason, but no longer than a living one takes."""
    wanted = [f"heard/{rank}" for rank in range(1, world_size)]
    deadline = time.monotonic() + HEARD_TIMEOUT_S
    while time.monotonic() < deadline and not store.check(wanted):
        time.sleep(LOOK_INTERVAL_S)
