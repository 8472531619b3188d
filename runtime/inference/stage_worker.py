"""Worker threads of inference, and what they run on each micro-batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager

import torch
from torch import nn

from .microbatch import InFlightMicrobatch, OrderedQueue, Values
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
        self._queue, self._process, self._on_error = queue, process, on_error
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.thread.start()

    def end(self) -> None:
        """Ask the thread to end after its current micro-batch, without waiting for it."""
        self._queue.close()

    def _work(self) -> None:
        try:
            while (microbatch := self._queue.get()) is not None:
                self._process(microbatch)
                del microbatch  # or its tensors would stay allocated until the next one arrives
        except BaseException as error:  # noqa: BLE001 (no caller to raise to)
            self._on_error(error)


class InferenceStage:
    """Runs one stage on micro-batches, in inference mode and optionally under autocast.

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
            with self._modes(), self._device.use_stream():
                inputs = self._device.move_here(microbatch.values, microbatch.ready)
                outputs: Values = tuple(self._stage(*inputs))
                return microbatch.with_values(outputs, self._device.record_event())
        except BaseException as error:  # noqa: BLE001 (it is raised where the result is read)
            error.add_note(f"in stage {self._index}")
            return microbatch.with_error(error)

    @contextmanager
    def _modes(self) -> Iterator[None]:
        device, dtype = self._device.device.type, self._autocast
        with torch.inference_mode(), torch.autocast(device, dtype, dtype is not None):
            yield
