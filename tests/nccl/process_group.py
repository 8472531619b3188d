"""A process group with NCCL's manners over gloo, which moves the data.

It records what each rank launches and what it waits for, for `launches.find_deadlock`. Values
arrive as in gloo, so results are right; what NCCL would do with the order is found by the replay.
While ranks run, `wait` does block, as gloo's does, for the values to be there: only in the replay
does a host run ahead of its device.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from stagewright.runtime.engine import p2p
from stagewright.runtime.ranks import device_placement, process_groups
from tests.nccl.host_group import HOST_BACKEND, GlooWrapper, HostGroup
from tests.nccl.host_tensor import HostTensor
from tests.nccl.launch_log import LOG
from tests.nccl.launches import (
    MAIN,
    USUAL,
    Cuda,
    DeviceSynchronise,
    Entry,
    HostMeeting,
    HostRead,
    Launch,
    Queue,
    find_deadlock,
)

BACKEND = "manners"

BOUND = "NCCL_MANNERS_BOUND"
"""Of the environment: ranks are bound to their devices (``init_process_group(device_id=...)``)."""


def is_bound() -> bool:
    """Return True for the order of ranks that are bound to devices.

    A group's communicator is then made with it, and all its messages share one stream.
    """
    return BOUND in os.environ


class LaunchedWork(dist._Work):
    """An operation under way, for which the host never waits as far as the log is concerned."""

    def __init__(self, number: int, inner: Any, lost: Callable[[], None], *, blocks: bool) -> None:
        super().__init__()
        self._number, self._inner, self._lost = number, inner, lost
        self._blocks = blocks

    def wait(self, timeout: timedelta | None = None) -> bool:
        LOG.wait(self._number)
        if self._blocks:
            LOG.add(HostRead("a barrier"))
        try:
            if self._inner is None:
                self._lost()
            else:
                self._inner.wait()
        except RuntimeError:
            self._lost()
        return True

    def is_completed(self) -> bool:
        return self._inner is not None and self._inner.is_completed()

    def get_future(self) -> Any:
        LOG.wait(self._number)  # its callbacks run behind the operation
        return self._inner.get_future()

    def result(self) -> Any:
        return self._inner.result()


class MannersGroup(GlooWrapper):
    """Process group that logs what is launched, and on which stream; see the module."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(store, rank, size, timeout)
        self._aborted = threading.Event()

    def getBackendName(self) -> str:
        return BACKEND

    def abort(self) -> None:
        """End what waits for lost ranks, as aborting a communicator does."""
        self._aborted.set()

    def shutdown(self) -> None:
        self.abort()

    def _message(self, tensors: Sequence[torch.Tensor], peer: int, *, sends: bool) -> int:
        ranks = self._ranks()
        mine, theirs = ranks[self.rank()], ranks[peer]
        pair = (min(mine, theirs), max(mine, theirs))
        queue: Queue = (f"group {self.group_name}",)
        if not is_bound():
            # Each pair of a group has a communicator and a stream, made at its first message.
            queue += (f"pair {pair[0]}-{pair[1]}",)
            LOG.connect(queue, pair)
        _check_dtypes(tensors)
        sender, receiver = (mine, theirs) if sends else (theirs, mine)
        shape = "x".join(map(str, tensors[0].shape))
        what = f"message {sender} to {receiver} of {shape} {tensors[0].dtype}"
        return LOG.launch(Launch(queue, pair, what, sender))

    def _collective(self, name: str, number_of_elements: int) -> int:
        ranks = tuple(self._ranks())
        queue = (f"group {self.group_name}",)
        if not is_bound():
            LOG.connect(queue, ranks)
        return LOG.launch(Launch(queue, ranks, f"{name} of {number_of_elements} elements"))

    def _launched(
        self, number: int, start: Callable[[], Any], *, blocks: bool = False
    ) -> LaunchedWork:
        """Launch an operation, which fails on an aborted communicator, but not for a lost peer."""
        if self._aborted.is_set():
            raise dist.DistBackendError(f"NCCL communicator was aborted on rank {self.rank()}.")
        try:
            inner = start()
        except RuntimeError:
            inner = None
        return LaunchedWork(number, inner, self._hang, blocks=blocks)

    def _hang(self) -> None:
        """A lost peer raises nothing: the stream waits until the communicator is aborted."""
        self._aborted.wait()

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> LaunchedWork:
        number = self._message(tensors, peer, sends=True)
        return self._launched(number, lambda: self._inner.send(tensors, peer, tag))

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> LaunchedWork:
        number = self._message(tensors, peer, sends=False)
        return self._launched(number, lambda: self._inner.recv(tensors, peer, tag))

    def barrier(self, opts: Any) -> LaunchedWork:
        number = self._collective("barrier", 0)
        return self._launched(number, lambda: self._inner.barrier(opts), blocks=True)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> _AllWorks:
        pairs = zip(outputs, inputs, strict=True)
        return _AllWorks([self._allgather_base(*pair, opts) for pair in pairs])  # type: ignore

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> _AllWorks:
        pairs = zip(outputs, inputs, strict=True)
        return _AllWorks([self._reduce_scatter_base(*pair, opts) for pair in pairs])  # type: ignore


class _AllWorks(dist._Work):
    """Several operations as one: gloo has no coalesced ones."""

    def __init__(self, works: Sequence[LaunchedWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        return all([work.wait() for work in self._works])


def _check_dtypes(values: Any) -> None:
    """Refuse what ProcessGroupNCCL has no type for, as it does."""
    if isinstance(values, torch.Tensor) and values.dtype in (
        torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn,
        torch.float8_e5m2, torch.complex64, torch.complex128,
    ):  # fmt: skip
        raise RuntimeError(f"Input tensor data type is not supported for NCCL: {values.dtype}")
    for value in values if isinstance(values, list | tuple) else ():
        _check_dtypes(value)


def _count(values: Any) -> int:
    if isinstance(values, torch.Tensor):
        return values.numel()
    return sum(map(_count, values)) if isinstance(values, list | tuple) else 0


def _add_collective(name: str) -> None:
    def run(self: MannersGroup, *arguments: Any, **options: Any) -> LaunchedWork:
        _check_dtypes(arguments)
        # The root of a gather or scatter passes more tensors than the others.
        elements = 0 if name in ("gather", "scatter") else max(map(_count, arguments))
        number = self._collective(name.strip("_"), elements)
        launch = functools.partial(getattr(self._inner, name), *arguments, **options)
        return self._launched(number, launch)

    setattr(MannersGroup, name, run)


for _name in (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "_allgather_base",
    "broadcast",
    "gather",
    "scatter",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "alltoall",
    "alltoall_base",
):
    _add_collective(_name)


def register() -> None:
    """Make the backends known to ``torch.distributed``."""
    for name, group in ((BACKEND, MannersGroup), (HOST_BACKEND, HostGroup)):
        if not hasattr(dist.Backend, name.upper()):
            dist.Backend.register_backend(name, group, devices=["cpu"])


READS = frozenset(
    f"aten::{name}"
    for name in (
        "_local_scalar_dense", "equal", "nonzero", "masked_select", "unique_dim", "_unique2",
        "unique_consecutive", "repeat_interleave", "bincount",
    )
)  # fmt: skip
"""Operations for whose result, or its size, the host has to wait."""


def _picks_by_mask(name: str, arguments: Any) -> bool:
    """Return True for ``x[mask]``: how much it picks is known when the mask was computed."""
    if name not in ("aten::index", "aten::index_put_"):
        return False
    return any(index is not None and index.dtype == torch.bool for index in arguments[1])


class _HostReads(TorchDispatchMode):
    """Records reads of values by the host, and the first use of each operation."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function._schema.name
        if LOG.is_entered():
            LOG.load(name)
            if name in READS or _picks_by_mask(name, args):
                LOG.add(HostRead(name))
        return function(*args, **(kwargs or {}))


def _reading(method: Callable[..., Any], words: str) -> Callable[..., Any]:
    """Return a method of tensors whose call is recorded as a read by the host."""

    @functools.wraps(method)
    def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if type(self) is not HostTensor:
            LOG.add(HostRead(words))
        return method(self, *args, **kwargs)

    return read


def _making(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes numbers on the host: to a device they are copied."""

    @functools.wraps(function)
    def make(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is not None:
            LOG.add(HostRead("a blocking copy"))
        return function(*args, device=device, **kwargs)

    return make


@contextlib.contextmanager
def recorded_host() -> Iterator[None]:
    """Record what makes the host wait for a device: reads of values, in threads started here too.

    Modes of torch are each thread's own.
    """
    run = threading.Thread.run

    def run_recorded(self: threading.Thread) -> None:
        LOG.enter_thread(self.name)
        with _HostReads():
            run(self)

    LOG.enter_thread(MAIN)
    with contextlib.ExitStack() as stack:
        for name, words in (
            ("tolist", "tolist"), ("cpu", "a copy to the host"), ("numpy", "a copy to the host"),
            ("new_tensor", "a blocking copy"),
        ):  # fmt: skip
            read = _reading(getattr(torch.Tensor, name), words)
            stack.enter_context(mock.patch.object(torch.Tensor, name, read))
        for name in ("tensor", "as_tensor"):
            make = _making(getattr(torch, name))
            stack.enter_context(mock.patch.object(torch, name, make))
        stack.enter_context(mock.patch.object(threading.Thread, "run", run_recorded))
        stack.enter_context(_HostReads())
        yield


class RecordedEvent:
    """Stand-in for ``torch.cuda.Event``, of the one compute stream."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._waits: int | None = None
        self._seconds = 0.0

    def record(self, stream: object = None) -> None:
        self._waits, self._seconds = LOG.waits, time.perf_counter()

    def synchronize(self) -> None:
        assert self._waits is not None, "the event was not recorded"
        LOG.add(HostRead("an event", self._waits))

    def elapsed_time(self, later: RecordedEvent) -> float:
        return 1e3 * (later._seconds - self._seconds)


def synchronise_device(device: object = None) -> None:
    """Stand in for ``torch.cuda.synchronize``."""
    LOG.add(DeviceSynchronise())


@contextlib.contextmanager
def queueing_device() -> Iterator[None]:
    """Take the CPU for a device that queues its work."""
    with (
        mock.patch.object(device_placement, "QUEUEING", {"cuda", "cpu"}),
        mock.patch.object(torch.cuda, "Event", RecordedEvent),
        mock.patch.object(torch.cuda, "synchronize", synchronise_device),
        mock.patch.object(torch.cuda, "current_stream", return_value=None),
    ):
        yield


@contextlib.contextmanager
def manners() -> Iterator[None]:
    """Make every process group one with NCCL's manners."""
    register()
    start, create = dist.init_process_group, dist.new_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        start(BACKEND, *args, **kwargs)

    @functools.wraps(create)
    def new_group(*args: Any, backend: str | None = None, **kwargs: Any) -> Any:
        chosen = HOST_BACKEND if backend == "gloo" else backend
        return create(*args, backend=chosen, **kwargs)

    def batch_isend_irecv(operations: Any) -> Any:
        raise NotImplementedError("the emulation launches one by one what NCCL would as a group")

    with recorded_host(), queueing_device(), contextlib.ExitStack() as stack:
        for made in (init_process_group, new_group, batch_isend_irecv):
            stack.enter_context(mock.patch.object(dist, made.__name__, made))
        for module in (process_groups, p2p):
            stack.enter_context(mock.patch.object(module, "is_bound_to_devices", is_bound))
        yield


@contextlib.contextmanager
def emulated(folder: Path) -> Iterator[None]:
    """Run as on NCCL, and write this rank's log at the end, unless an error is the end.

    The file's name begins with what the ranks of one start share: the port, and how often torchrun
    has started them again.
    """
    with manners():
        yield
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    write_log(folder, f"{os.environ['MASTER_PORT']}.{attempt}", int(os.environ["RANK"]))


def write_log(folder: Path, start: str, rank: int) -> None:
    """Write what this rank did since the start for `find_deadlocks`, and begin anew."""
    (folder / f"{start}-{rank}.pickle").write_bytes(pickle.dumps(LOG.entries))
    LOG.clear()


def find_deadlocks(folder: Path, cuda: Cuda = USUAL) -> list[str]:
    """Replay all logs in a folder; return a description of each start that would not end."""
    starts: dict[str, dict[int, list[Entry]]] = {}
    for path in folder.glob("*.pickle"):
        start, _, rank = path.stem.rpartition("-")
        starts.setdefault(start, {})[int(rank)] = pickle.loads(path.read_bytes())
    assert starts, "no rank left a log"
    # Or a program that was never emulated would pass.
    for start, logs in starts.items():
        silent = [rank for rank, log in logs.items() if not any(map(_communicates, log))]
        assert not silent, f"ranks {silent} launched nothing in start {start}"
    found = [find_deadlock([logs[rank] for rank in sorted(logs)], cuda) for logs in starts.values()]
    return [words for words in found if words is not None]


def _communicates(entry: Entry) -> bool:
    return isinstance(entry, Launch | HostMeeting)
