"""Start and end of an RPC session, in which one process controls and all others serve.

A worker ends when the controller dismisses it or is gone, so that no process is left behind.
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
POLL_INTERVAL_S = 0.2
ACKNOWLEDGE_TIMEOUT_S = 2.0

END = "end"
SUCCESS = "well"


@contextmanager
def controller(
    world_size: int, address: str, *, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Iterator[None]:
    """Control the workers as master (rank 0) and dismiss them at the end.

    An error in the body also ends the workers, with a `RankFailed` that quotes it.

    Args:
        world_size: Number of processes, this one included.
        address: ``host:port`` for this process to listen on.
        timeout_s: Limit of every call; a backward pass over all stages is one call.

    Raises:
        RankFailed: Not all processes joined.
    """
    store = _join(CONTROLLER, 0, world_size, address, timeout_s)
    try:
        yield
    except BaseException as error:
        store.set(END, f"{type(error).__name__}: {error}")
        # The store ends with this process, so the workers must read the reason first. Then no
        # graceful shutdown: it would wait for all workers, and one may be the cause of the error.
        _wait_for_acknowledgements(store, world_size)
        rpc.shutdown(graceful=False)
        raise
    store.set(END, SUCCESS)
    rpc.shutdown(timeout=timeout_s)


def serve(
    name: str, rank: int, world_size: int, address: str, *, timeout_s: float = DEFAULT_TIMEOUT_S
) -> None:
    """Serve calls of the session's other processes until dismissed.

    Args:
        name: Name of this process, such as ``worker1``.
        rank: Rank of this process, from 1.
        world_size: Number of processes, the controller included.
        address: ``host:port`` of the controller.
        timeout_s: Timeout given to `controller`.

    Raises:
        RankFailed: The controller gave up, or is gone.
    """
    if name == CONTROLLER or rank < 1:
        raise InvalidInput(
            f"name {name!r} or rank {rank} is the controller's; worker ranks start at 1"
        )
    store = _join(name, rank, world_size, address, timeout_s)
    try:
        # Polled: the store's own wait ends with its timeout, but a session may last longer.
        while not store.check([END]):
            time.sleep(POLL_INTERVAL_S)
        reason = str(store.get(END), "utf-8")
        store.set(f"heard/{rank}", "1")
    except RuntimeError:
        # Raised by the store, whose server ends with the controller.
        reason = f"the controller at {address} stopped answering"
    if reason != SUCCESS:
        rpc.shutdown(graceful=False)
        raise RankFailed(f"{name} stopped serving: {reason}", ranks=(0,))
    rpc.shutdown(timeout=timeout_s)


def _join(name: str, rank: int, world_size: int, address: str, timeout_s: float) -> Store:
    """Join the session; return a store in which its end is announced.

    It is the store of the RPC rendezvous. It lives in the controller's process, so that workers
    notice when that process is gone.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise InvalidInput(f"invalid address {address!r}; use host:port, such as 10.0.0.1:29500")
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
        # A process may hold several sessions in turn; their keys must not mix.
        number = store.add(f"stagewright-rpc/sessions of rank {rank}", 1)
        session = PrefixStore(f"stagewright-rpc/{number}", store)
        session.set(f"joined/{rank}", "1")
        if rank == 0:
            # Otherwise a very short session could be over, and its store gone, before a worker has
            # connected to it.
            session.wait([f"joined/{other}" for other in range(world_size)])
    except RuntimeError as error:
        raise RankFailed(
            f"{name} could not join the session at {address}: {str(error).strip()}. Start "
            f"{world_size} processes with this address and ranks from 0 to {world_size - 1}"
        ) from error
    return session


def _wait_for_acknowledgements(store: Store, world_size: int) -> None:
    """Wait until all workers have read the reason; a dead one must not delay the end."""
    wanted = [f"heard/{rank}" for rank in range(1, world_size)]
    deadline = time.monotonic() + ACKNOWLEDGE_TIMEOUT_S
    while time.monotonic() < deadline and not store.check(wanted):
        time.sleep(POLL_INTERVAL_S)
