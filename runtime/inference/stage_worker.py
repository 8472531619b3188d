"""Worker threads of inference, and what they run on each micro-batch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import replace

import torch
from torch import nn

from .microbatch import InFlightMicrobatch, OrderedQueue
from .stage_device import InferenceDevice


class QueueWorker:
    """Thread that processes the micro-batches of a queue in order until the queue is closed.

    An error ends the thread and the whole pipeline; ``on_error`` is called with it.
    """

    def __init__(
        self,
        name: str,
        queue: OrderedQueue,
        process: Callable[[InFlightMicrobatch], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._queue, self._process = queue, process
        self.thread = start_thread(name, self._work, on_error)

    def end(self) -> None:
        """Ask the thread to end after its current micro-batch, without waiting for it."""
        self._queue.close()

    def _work(self) -> None:
        while (microbatch := self._queue.get()) is not None:
            self._process(microbatch)
            del microbatch  # or its tensors would stay allocated until the next one arrives


def start_thread(
    name: str, work: Callable[[], None], on_error: Callable[[BaseException], None]
) -> threading.Thread:
    """Start a daemon thread, whose error goes to ``on_error``: there is no caller to raise to."""

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 (passed on)
            on_error(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


class InferenceStage:
    """Runner of one stage on micro-batches, in inference mode and optionally under autocast.

    An error of the stage fails its micro-batch only; the next one runs as usual.
    """

    def __init__(
        self, index: int, stage: nn.Module, device: InferenceDevice, autocast: torch.dtype | None
    ) -> None:
        self._index, self._stage, self._device, self._autocast = index, stage, device, autocast

    def run(self, microbatch: InFlightMicrobatch) -> InFlightMicrobatch:
        """Return the micro-batch with this stage's outputs, or with the error it fails with."""
        if microbatch.error is not None:
            return microbatch
        if not microbatch.is_wanted():
            return microbatch.with_error(CancelledError())
        try:
            dtype = self._autocast
            autocast = torch.autocast(self._device.device.type, dtype, dtype is not None)
            with torch.inference_mode(), autocast, self._device.use_stream():
                inputs = self._device.move_here(microbatch.values, microbatch.ready)
                outputs = tuple(self._stage(*inputs))
                return replace(microbatch, values=outputs, ready=self._device.record_event())
        except BaseException as error:  # noqa: BLE001 (it is raised where the result is read)
            error.add_note(f"in stage {self._index}")
            return microbatch.with_error(error)
