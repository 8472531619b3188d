"""Liveness check: the master pings all workers twice a second."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed.rpc as rpc
from torch._C._distributed_rpc import _get_current_rpc_agent
from torch.futures import Future

from ...core.errors import InvalidInput, RankFailed, StagewrightError, first_line
from .calls import StageError, send

INTERVAL_S = 0.5
FINAL_CHECK_S = 5.0
"""Time for every worker to answer after a call failed, before the call itself is blamed."""

PYTHON_ERROR = "Python code raised (a hook, a custom backward); torch does not pass its message on"


def report_location() -> str:
    """Return this worker's host and process id; runs on the worker."""
    return f"{socket.gethostname()}, process {os.getpid()}"


@dataclass(frozen=True)
class LostWorker:
    """Worker that stopped answering: its name, location and last error, and its rank."""

    description: str
    rank: int

    def to_error(self, doing: str) -> RankFailed:
        """Return the error for the master, which was at ``doing``."""
        return RankFailed(
            f"{self.description}; the master was at {doing}. Restart all processes from the last "
            "checkpoint",
            ranks=(self.rank,),
        )


class LivenessCheck:
    """Liveness check of the workers, which ends waits for calls when a worker is lost.

    ``torch.distributed.rpc`` itself notices a lost process only when a call to it times out.

    ``timeout_s`` is the longest silence of a worker; the end of its process is noticed at once.
    """

    def __init__(self, workers: Sequence[str], timeout_s: float) -> None:
        _check_names(workers)
        self._timeout_s = timeout_s
        self.missing: LostWorker | None = None
        self._where = dict.fromkeys(workers, "never answered")
        self._stop = threading.Event()
        # All first calls are under way before the first wait, so that several absent workers cost
        # one timeout.
        self._pings = {worker: self._ping(worker) for worker in self._where}
        for worker, future in self._pings.items():
            self._record_answer(worker, future)
        self.check("its first call")
        self._thread = threading.Thread(target=self._repeat, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop checking."""
        self._stop.set()
        self._thread.join()

    def check(self, doing: str) -> None:
        """Raise `RankFailed` if a worker was lost; the message names it."""
        if self.missing is not None:
            raise self.missing.to_error(doing)

    def wait(self, worker: str, future: Future[Any], doing: str) -> Any:
        """Wait for the result of a call started with `call_safely`; raise what it raised there."""
        # Polling, because a blocking wait would end only with the call's own timeout, perhaps long
        # after the pings have noticed a lost worker.
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        while not done.wait(INTERVAL_S):
            self.check(doing)
        try:
            value = future.wait()
        except RuntimeError as error:
            raise self._explain(error, f"{doing} on {worker}") from error
        if isinstance(value, StagewrightError):
            raise value
        return value

    def run(self, work: Callable[[], Any], doing: str) -> None:
        """Run work that waits for workers by other means than `wait`.

        It runs on a separate thread, which is abandoned if a worker is lost: torch offers no way
        to interrupt a distributed backward.
        """
        errors: list[BaseException] = []

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 (raised below)
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(INTERVAL_S)
            # Asked only of unfinished work: a loss does not undo work that has just completed.
            if thread.is_alive():
                self.check(doing)
        for error in errors:
            if isinstance(error, RuntimeError):
                raise self._explain(error, doing) from error
            raise error

    def _repeat(self) -> None:
        while self.missing is None and not self._stop.wait(INTERVAL_S):
            for worker, future in self._pings.items():
                # Only answered pings are read and repeated. Reading another would block on a silent
                # worker, and `close` joins this thread.
                if future.done():
                    self._record_answer(worker, future)
                    self._pings[worker] = self._ping(worker)

    def _ping(self, worker: str, timeout_s: float | None = None) -> Future[Any]:
        return send(worker, report_location, timeout_s=timeout_s or self._timeout_s)

    def _record_answer(self, worker: str, future: Future[Any]) -> None:
        """Record a worker's answer, or that it is lost."""
        try:
            self._where[worker] = future.wait()
        except RuntimeError as error:
            self.missing = self.missing or LostWorker(
                f"{worker} ({self._where[worker]}) stopped answering ({first_line(error)})",
                int(rpc.get_worker_info(worker).id),
            )

    def _check_all(self) -> None:
        for worker, future in [(name, self._ping(name, FINAL_CHECK_S)) for name in self._where]:
            self._record_answer(worker, future)

    def _explain(self, error: RuntimeError, doing: str) -> Exception:
        """Return an error that names the worker, if the error came from another process."""
        # A lost worker first: its calls fail with all kinds of errors, here and on its neighbours.
        self._check_all()
        if self.missing is not None:
            return self.missing.to_error(doing)
        # Torch's prefix of errors of a call itself, such as its timeout.
        if "RPCErr" in str(error):
            return RankFailed(
                f"{doing} failed, though every worker answers: {first_line(error)}. If it needs "
                "more time, raise timeout_s of controller and serve"
            )
        # Torch's form of an error in code that it runs on a worker itself, such as a backward;
        # `call_safely` has no part in it.
        if found := re.match(r"Error on Node (\d+): ", str(error)):
            what = str(error)[found.end() :].replace("python_error", PYTHON_ERROR)
            return StageError(f"on {self._name(int(found[1]))}, {doing}: {what}")
        return error

    def _name(self, rank: int) -> str:
        names = (name for name in self._where if int(rpc.get_worker_info(name).id) == rank)
        return next(names, f"rank {rank}")


def _check_names(workers: Sequence[str]) -> None:
    """Raise `InvalidInput` for an unknown name; torch would not say which names exist."""
    # Private: the public function looks up one name and cannot list them.
    here = {info.name: info.id for info in _get_current_rpc_agent().get_worker_infos()}
    unknown = [name for name in dict.fromkeys(workers) if name not in here]
    if unknown:
        raise InvalidInput(
            f"this session has no worker {', '.join(map(repr, unknown))}; its processes are "
            f"{', '.join(sorted(here, key=lambda name: here[name]))}"
        )
