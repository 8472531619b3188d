"""Threads that run the stages of a clock cycle in parallel, one per device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Self

import torch

StageTask = Callable[[], None]


class DeviceThreads:
    """Runs tasks on the threads of their devices, inside a ``with`` block.

    Stages on one device share a thread, since they share its random number generator and would
    otherwise draw from it in an order that changes between runs. With a single device, the
    calling thread runs all tasks.
    """

    def __init__(self, devices: Sequence[torch.device | None]) -> None:
        self._devices = devices
        self._threads: dict[torch.device | None, ThreadPoolExecutor] = {}

    def __enter__(self) -> Self:
        distinct = dict.fromkeys(self._devices)
        if len(distinct) > 1:
            self._threads = {device: ThreadPoolExecutor(1, "stage") for device in distinct}
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        for thread in self._threads.values():
            thread.shutdown()

    def run(self, tasks: Sequence[tuple[int, StageTask]]) -> None:
        """Run a task for each of some stages; raise the first error once all tasks have ended."""
        if self._threads:
            started = [self._threads[self._devices[stage]].submit(task) for stage, task in tasks]
            errors = [future.exception() for future in started]
        else:
            errors = [_run_task(task) for _, task in tasks]
        for error in errors:
            if error is not None:
                raise error


def _run_task(task: StageTask) -> Exception | None:
    try:
        task()
    except Exception as error:  # noqa: BLE001 - raised by the caller, when the others have run
        return error
    return None
