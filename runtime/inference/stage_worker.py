"""A thread that takes one piece after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager

import torch
from torch import nn

from .microbatch import Inbox, Piece, Values
from .stage_device import Seat


class Worker:
    """Does something with each piece of an inbox, in order, until the inbox is closed.

    Args:
        name: Of the thread.
        inbox: Where the pieces wait.
        do: Raises only when nothing can go on.
        failed: Told what ``do`` raised; the thread ends then.
    """

    def __init__(
        self,
        name: str,
        inbox: Inbox,
        do: Callable[[Piece], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._inbox, self._do, self._failed = inbox, do, failed
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.thread.start()

    def end(self) -> None:
        """Have the thread end, behind the piece it is at; does not wait for it."""
        self._inbox.close()

    def _work(self) -> None:
        try:
            while (piece := self._inbox.take()) is not None:
                self._do(piece)
                del piece  # or its memory is kept until the next one comes
        except BaseException as error:  # noqa: BLE001 (a thread has nobody to raise to)
            self._failed(error)


class StageWork:
    """Runs a stage on pieces, each in inference mode and under autocast if so asked.

    What a stage raises belongs to its piece; the next one is worked on as ever.

    Args:
        index: Which stage.
        stage: Flat tensors in, a tuple out.
        seat: Where it works.
        autocast: The dtype of autocast; `None` for none.
    """

    def __init__(
        self, index: int, stage: nn.Module, seat: Seat, autocast: torch.dtype | None
    ) -> None:
        self._index, self._stage, self._seat, self._autocast = index, stage, seat, autocast

    def through(self, piece: Piece) -> Piece:
        """The piece behind this stage; as it is if it failed before or is not wanted."""
        if piece.error is not None:
            return piece
        if not piece.is_wanted():
            return piece.failed(CancelledError())
        try:
            with self._modes(), self._seat.taken():
                inputs = self._seat.bring(piece.values, piece.ready)
                outputs: Values = tuple(self._stage(*inputs))
                return piece.made(outputs, self._seat.done())
        except BaseException as error:  # noqa: BLE001 (it is raised where the result is read)
            error.add_note(f"in stage {self._index}")
            return piece.failed(error)

    @contextmanager
    def _modes(self) -> Iterator[None]:
        device, dtype = self._seat.device.type, self._autocast
        with torch.inference_mode(), torch.autocast(device, dtype, dtype is not None):
            yield
