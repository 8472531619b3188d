"""Which workers are still there: the master asks all of them, twice a second."""

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

from ...core.errors import InvalidInput, RankFailed
from .calls import Failure, StageError, send

INTERVAL_S = 0.5
LAST_LOOK_S = 5.0
"""How long a worker has to answer after a call failed, before the call itself is blamed."""

PYTHON_ERROR = "Python code raised (a hook, a custom backward), in words torch does not pass on"


def present() -> str:
    """Runs on a worker: where it is."""
    return f"{socket.gethostname()}, process {os.getpid()}"


@dataclass(frozen=True)
class Missing:
    """A worker that is gone.

    Attributes:
        who: Its name, and what became of it.
        rank: Its rank in the session.
    """

    who: str
    rank: int

    def to_error(self, doing: str) -> RankFailed:
        """What the master raises, which was at ``doing``."""
        return RankFailed(
            f"{self.who}; the master was at {doing}. Start all processes again, from the last "
            "checkpoint",
            ranks=(self.rank,),
        )


class RollCall:
    """Waits for other processes only as long as all of them are there.

    Args:
        workers: Their names.
        timeout_s: How long a worker may be silent; one whose process ended is noticed at once.

    Raises:
        InvalidInput: A name is nobody's in this session.
        RankFailed: A worker is missing already.
    """

    def __init__(self, workers: Sequence[str], timeout_s: float) -> None:
        _check_names(workers)
        self._timeout_s = timeout_s
        self.missing: Missing | None = None
        self._where = dict.fromkeys(workers, "never answered")
        self._stop = threading.Event()
        self._asked = {worker: self._ask(worker) for worker in self._where}
        for worker, future in self._asked.items():
            self._look(worker, future)
        self.check("its first call")
        self._thread = threading.Thread(target=self._repeat, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ask no more."""
        self._stop.set()
        self._thread.join()

    def check(self, doing: str) -> None:
        """Nothing, if all workers are there.

        Raises:
            RankFailed: One is not; the message names it.
        """
        if self.missing is not None:
            raise self.missing.to_error(doing)

    def wait(self, worker: str, future: Future[Any], doing: str) -> Any:
        """What a call started on a worker with `answer` returns.

        Raises:
            RankFailed: A worker died or stopped answering.
            StagewrightError: The function raised there.
        """
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        while not done.wait(INTERVAL_S):
            self.check(doing)
        try:
            value = future.wait()
        except RuntimeError as error:
            raise self._explained(error, f"{doing} on {worker}") from error
        if isinstance(value, Failure):
            raise value.to_error()
        return value

    def do(self, work: Callable[[], Any], doing: str) -> None:
        """Run something that waits for workers in ways of its own.

        It is left alone, on a thread of its own, if a worker dies meanwhile.

        Raises:
            RankFailed: A worker died or stopped answering.
        """
        errors: list[BaseException] = []

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 (raised by who waits)
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(INTERVAL_S)
            if thread.is_alive():
                self.check(doing)
        for error in errors:
            if isinstance(error, RuntimeError):
                raise self._explained(error, doing) from error
            raise error

    def _repeat(self) -> None:
        while self.missing is None and not self._stop.wait(INTERVAL_S):
            for worker, future in self._asked.items():
                if future.done():
                    self._look(worker, future)
                    self._asked[worker] = self._ask(worker)

    def _ask(self, worker: str, timeout_s: float | None = None) -> Future[Any]:
        return send(worker, present, timeout_s=timeout_s or self._timeout_s)

    def _look(self, worker: str, future: Future[Any]) -> None:
        """Read an answer, or take note that there is none."""
        try:
            self._where[worker] = future.wait()
        except RuntimeError as error:
            self.missing = self.missing or Missing(
                f"{worker} ({self._where[worker]}) stopped answering ({_first_line(error)})",
                int(rpc.get_worker_info(worker).id),
            )

    def _look_again(self) -> None:
        for worker, future in [(name, self._ask(name, LAST_LOOK_S)) for name in self._where]:
            self._look(worker, future)

    def _explained(self, error: RuntimeError, doing: str) -> Exception:
        """The same error in words that say where, if it came from another process."""
        self._look_again()
        if self.missing is not None:
            return self.missing.to_error(doing)
        if "RPCErr" in str(error):
            return RankFailed(
                f"{doing} failed, though every worker answers: {_first_line(error)}. If it takes "
                "longer, give controller and serve more with timeout_s="
            )
        if found := re.match(r"Error on Node (\d+): ", str(error)):
            what = str(error)[found.end() :].replace("python_error", PYTHON_ERROR)
            return StageError(f"on {self._name(int(found[1]))}, {doing}: {what}")
        return error

    def _name(self, rank: int) -> str:
        names = (name for name in self._where if int(rpc.get_worker_info(name).id) == rank)
        return next(names, f"rank {rank}")


def _check_names(workers: Sequence[str]) -> None:
    """An unknown name is for torch a destination that it could not find, no more."""
    here = {info.name: info.id for info in _get_current_rpc_agent().get_worker_infos()}
    unknown = [name for name in dict.fromkeys(workers) if name not in here]
    if unknown:
        raise InvalidInput(
            f"this session has no worker {', '.join(map(repr, unknown))}; the processes that met "
            f"are {', '.join(sorted(here, key=lambda name: here[name]))}"
        )


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
