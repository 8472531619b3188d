"""Which workers are still there: the master asks all of them, twice a second."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed.rpc as rpc
from torch.futures import Future

from ...core.errors import RankFailed
from .calls import Failure, answer, send

INTERVAL_S = 0.5
LAST_LOOK_S = 5.0
"""How long a worker has to answer after a call failed, before the call itself is blamed."""


def present() -> str:
    """Runs on a worker: where it is."""
    return f"{socket.gethostname()}, process {os.getpid()}"


class RollCall:
    """Waits for other processes only as long as all of them are there.

    Args:
        workers: Their names.
        timeout_s: How long a worker may be silent; one whose process ended is noticed at once.

    Raises:
        RankFailed: A worker is missing already.
    """

    def __init__(self, workers: Sequence[str], timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self.failure: RankFailed | None = None
        self._where = dict.fromkeys(workers, "never answered")
        self._stop = threading.Event()
        self._asked = {worker: self._ask(worker) for worker in self._where}
        for worker, future in self._asked.items():
            self._look(worker, future)
        if self.failure is not None:
            raise self.failure
        self._thread = threading.Thread(target=self._repeat, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ask no more."""
        self._stop.set()
        self._thread.join()

    def check(self) -> None:
        """Nothing, if all workers are there.

        Raises:
            RankFailed: One is not; the message names it.
        """
        if self.failure is not None:
            raise self.failure

    def ask(self, worker: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function on a worker and wait for what it returns.

        Raises:
            RankFailed: A worker died or stopped answering.
            StagewrightError: The function raised there.
        """
        return self.wait(worker, send(worker, answer, function, *args))

    def wait(self, worker: str, future: Future[Any]) -> Any:
        """What a call started on a worker with `answer` returns; raises like `ask`."""
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        while not done.wait(INTERVAL_S):
            self.check()
        try:
            value = future.wait()
        except RuntimeError as error:
            raise self._explained(error, worker) from error
        if isinstance(value, Failure):
            raise value.to_error()
        return value

    def do(self, work: Callable[[], Any], what: str) -> None:
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
                self.check()
        if errors and isinstance(errors[0], RuntimeError):
            self._look_again()
            if self.failure is not None:
                raise RankFailed(f"{self.failure}, at {what}", ranks=self.failure.ranks)
        if errors:
            raise errors[0]

    def _repeat(self) -> None:
        while self.failure is None and not self._stop.wait(INTERVAL_S):
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
            self.failure = self.failure or RankFailed(
                f"{worker} ({self._where[worker]}) stopped answering ({_first_line(error)}); "
                "start all processes again, from the last checkpoint",
                ranks=(int(rpc.get_worker_info(worker).id),),
            )

    def _look_again(self) -> None:
        for worker, future in [(name, self._ask(name, LAST_LOOK_S)) for name in self._where]:
            self._look(worker, future)

    def _explained(self, error: RuntimeError, worker: str) -> RankFailed:
        self._look_again()
        return self.failure or RankFailed(f"a call to {worker} failed: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
