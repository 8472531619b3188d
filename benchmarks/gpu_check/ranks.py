"""Ranks in processes of their own, joined by whatever carries their tensors on this machine."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.distributed as dist

from benchmarks.gpu_check import relay_group
from benchmarks.gpu_check.records import Record
from stagewright.profiler.links.launch_local import free_port
from stagewright.runtime.ranks.device_placement import prepare_cuda
from stagewright.runtime.ranks.process_groups import choose_backend
from tests.nccl.process_group import emulated, find_deadlocks

Way = Literal["nccl", "relay", "gloo", "emulated"]

WORDS: dict[Way, str] = {
    "nccl": "NCCL between GPUs",
    "relay": "gloo through the CPU's memory, all ranks computing on one device",
    "gloo": "gloo, all ranks computing on the CPU",
    "emulated": "gloo with NCCL's order and torch.cuda's calls, on a CPU taken for a GPU",
}

TIMEOUT_S = 60.0
"""How long a rank waits for another."""


def list_ways(device: str) -> list[Way]:
    """Return the ways to try on this machine, the most telling first."""
    return ["nccl", "relay"] if device == "cuda" else ["emulated", "relay"]


def way_found(folder: Path, device: str) -> Way:
    """Return the way that the two stages ran by, or the likeliest if they did not run."""
    try:
        record = Record(**json.loads((folder / "two-stages.json").read_text(encoding="utf-8")))
        found: Way | None = record.result.get("way")
    except (OSError, ValueError, TypeError):
        found = None
    if found is not None and found in list_ways(device):
        return found
    if device == "cuda":
        return "nccl" if torch.cuda.device_count() > 1 else "relay"
    return "emulated"


@dataclass(frozen=True)
class Seat:
    """One rank: who it is, how it meets the others, and where it may write."""

    rank: int
    num_ranks: int
    way: Way
    port: int
    folder: Path
    small: bool

    @property
    def device(self) -> torch.device:
        if self.way in ("gloo", "emulated") or not torch.cuda.is_available():
            return torch.device("cpu")
        return torch.device("cuda", self.rank % torch.cuda.device_count())


Work = Callable[[Seat], Any]
"""What a rank does once it has joined the others; it returns values for JSON."""


class Ranks:
    """Ranks that do a work; none of them outlives the block.

    Attributes:
        accounts: What each rank wrote when it ended: ``result``, or ``error`` with its name.
    """

    def __init__(self, work: Work, way: Way, num_ranks: int, folder: Path, *, small: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder, port = folder, free_port()
        seats = [Seat(rank, num_ranks, way, port, folder, small) for rank in range(num_ranks)]
        self._processes = [
            context.Process(target=_take_seat, args=(work, seat), daemon=True) for seat in seats
        ]

    def __enter__(self) -> Self:
        for process in self._processes:
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def kill(self, rank: int) -> None:
        """Kill a rank as if its machine were gone."""
        self._processes[rank].kill()

    def wait(self, limit_s: float) -> list[int | None]:
        """Wait until every rank has ended; return exit codes, `None` for those still running."""
        deadline = time.monotonic() + limit_s
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return [process.exitcode for process in self._processes]

    def account(self, rank: int) -> dict[str, Any]:
        """Return what a rank wrote when it ended; nothing if it was killed before."""
        path = self._folder / f"account.{rank}.json"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found


def run_ranks(
    work: Work, way: Way, num_ranks: int, folder: Path, limit_s: float, *, small: bool
) -> list[Any]:
    """Run a work on ranks; return the result of each.

    Raises:
        RuntimeError: A rank failed or did not end in time; with the words of the first that did.
    """
    folder.mkdir(parents=True)
    with Ranks(work, way, num_ranks, folder, small=small) as ranks:
        codes = ranks.wait(limit_s)
        accounts = [ranks.account(rank) for rank in range(num_ranks)]
    faults = [(rank, account) for rank, account in enumerate(accounts) if "error" in account]
    # A rank that failed later may only have lost the one that failed before.
    for rank, account in sorted(faults, key=lambda fault: fault[1]["ended_s"]):
        raise RuntimeError(f"rank {rank}: {account['error']}")
    if any(codes) or None in codes:
        raise RuntimeError(f"ranks ended with {codes} within {limit_s:g} s, None being not at all")
    if way == "emulated" and (blocked := find_deadlocks(folder)):
        raise RuntimeError(f"on NCCL {blocked[0]}")
    return [account["result"] for account in accounts]


def _take_seat(work: Work, seat: Seat) -> None:
    """Join the others, work, and write the account."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(seat.port), RANK=str(seat.rank),
        WORLD_SIZE=str(seat.num_ranks), LOCAL_RANK=str(seat.rank), TORCH_CPP_LOG_LEVEL="ERROR",
    )  # fmt: skip
    torch.set_num_threads(1)
    if seat.device.type == "cuda" and seat.way != "nccl":
        prepare_cuda()
        torch.cuda.set_device(seat.device)
    backend, setting = _join_by(seat)
    code = 0
    try:
        with setting:
            dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_S))
            account = {"result": work(seat)}
    except BaseException as error:  # noqa: BLE001 (it goes into the account)
        traceback.print_exc()
        words = "".join(traceback.format_exception_only(error)).strip()
        kind = type(error).__name__
        account, code = {"error": words, "kind": kind, "ended_s": time.monotonic()}, 1
    (seat.folder / f"account.{seat.rank}.json").write_text(json.dumps(account), encoding="utf-8")
    # At a normal exit a transport whose other end is gone may wait for it, or abort the process.
    os._exit(code)


def _join_by(seat: Seat) -> tuple[str, AbstractContextManager[None]]:
    """Return the backend of a way, and what has to be in force while it is used."""
    if seat.way == "relay":
        relay_group.register()
        return relay_group.BACKEND, relay_group.taken_for_nccl(seat.device)
    if seat.way == "emulated":
        return "gloo", emulated(seat.folder)
    # As `stagewright.init_process_group`: this process takes the GPU of its LOCAL_RANK.
    return choose_backend(seat.way), nullcontext()
