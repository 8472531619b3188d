"""One rank of the conformance table: a process that does cell after cell."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from conformance_suite.cell import Cell, Side
from conformance_suite.masks import Masks, Recording
from conformance_suite.ours import OurTrial
from conformance_suite.reference import StepState, judge, unsplit
from conformance_suite.torch_trial import TorchTrial
from stagewright.core.errors import RankFailed, StagewrightError

TRANSPORT_TIMEOUT_S = 600.0
"""Beyond every limit of the table, so that what does not end is seen as a hang."""

MANNERS = "CONFORMANCE_AS_ON_NCCL"
"""Of the environment: the folder to which the ranks of a cell write what they launched."""

Phase = Literal["prepare", "run", "judge"]


class Trial(Protocol):
    """One side of a cell, on one rank."""

    states: list[StepState]

    def prepare(self) -> None: ...
    def run(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Failure:
    """An error, as text.

    Attributes:
        refused: It is one of ours, raised on purpose.
        follows: It only says that another rank failed.
    """

    text: str
    refused: bool
    follows: bool


def serve(rank: int, ranks: int, parent: int, orders: Connection) -> None:
    """Meet the other processes, then obey until the pipe closes."""
    torch.set_num_threads(1)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    with _manners():
        _serve(rank, ranks, parent, orders)


def _manners() -> AbstractContextManager[None]:
    """Run as on NCCL if the environment names a folder for what ranks launch."""
    if MANNERS not in os.environ:
        return nullcontext()
    from tests.nccl.process_group import manners

    return manners()


def _serve(rank: int, ranks: int, parent: int, orders: Connection) -> None:
    _meet(rank, ranks, orders)
    worker = Worker(rank)
    while True:
        while not orders.poll(1.0):
            if os.getppid() != parent:
                os._exit(1)
        try:
            phase, *arguments = orders.recv()
        except EOFError:
            os._exit(0)
        try:
            orders.send(getattr(worker, phase)(*arguments))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this cell's outcome
            orders.send(_failure(error))


def _meet(rank: int, ranks: int, orders: Connection) -> None:
    """Open the store, hosted by the first rank on a free port that it tells the others."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    timeout = timedelta(seconds=TRANSPORT_TIMEOUT_S)
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, ranks, True, timeout, wait_for_workers=False)
        orders.send(store.port)
    else:
        store = TCPStore("127.0.0.1", orders.recv(), ranks, False, timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    orders.send("ready")


class Worker:
    """The phases of a cell; every rank ends one before any begins the next."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._trial: Trial | None = None

    def prepare(self, side: Side, cell: Cell) -> None:
        self._cell = cell
        self._trial = OurTrial(cell) if side == "ours" else TorchTrial(cell)
        self._trial.prepare()

    def run(self) -> Masks:
        assert self._trial is not None
        recording = Recording() if self._cell.model == "dropout" else None
        with recording or nullcontext():
            self._trial.run()
        self._trial.close()
        if folder := os.environ.get(MANNERS):
            from tests.nccl.process_group import write_log

            write_log(Path(folder), "cell", self._rank)
        return dict(recording.masks) if recording else {}

    def judge(self, masks: Masks) -> Any:
        assert self._trial is not None
        return judge(self._trial.states, unsplit(self._cell, masks))


def _failure(error: BaseException) -> Failure:
    follows = isinstance(error, RankFailed)
    refused = isinstance(error, StagewrightError) and not follows
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return Failure(f"{type(error).__name__}: {lines[0] if lines else ''}", refused, follows)
