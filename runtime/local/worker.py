"""Threads that run the stages of one clock side by side, one for every device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import torch

Task = Callable[[], None]


class Workers:
    """Runs tasks on the threads of their devices, for the time of a ``with`` block.

    Stages on one device share a thread: they share its random numbers too, and would otherwise
    draw them in an order that changes from run to run. With one device alone there is nothing to
    do side by side, and the calling thread does it.

    Args:
        devices: Each stage's.
    """

    def __init__(self, devices: Sequence[torch.device | None]) -> None:
        self._devices = devices
        self._threads: dict[torch.device | None, ThreadPoolExecutor] = {}

    def __enter__(self) -> Self:
        distinct = dict.fromkeys(self._devices)
        if len(distinct) > 1:
            self._threads = {device: ThreadPoolExecutor(1, "stage") for device in distinct}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for thread in self._threads.values():
            thread.shutdown()

    def run(self, tasks: Sequence[tuple[int, Task]]) -> None:
        """Run one task for each of some stages, and wait until all have ended.

        Args:
            tasks: Pairs of stage and task.

        Raises:
            Exception: The first that failed, in the order given; the others have ended too.
        """
        if self._threads:
            started = [self._threads[self._devices[stage]].submit(task) for stage, task in tasks]
            errors = [future.exception() for future in started]
        else:
            errors = [_error_of(task) for _, task in tasks]
        for error in errors:
            if error is not None:
                raise error


def _error_of(task: Task) -> Exception | None:
    try:
        task()
    except Exception as error:  # noqa: BLE001 - raised by the caller, when the others have run
        return error
    return None
