"""Pieces between processes; each message says what it is, and of what shape.

Nothing has to be known beforehand, so batches may be of any size, a piece that failed carries its
error, and whoever waits need not know how many pieces will come.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .microbatch import Piece

HEAD_BYTES = 1024
"""Of the message in front, which nearly every head fits into: it costs one message, not two."""

LENGTH_BYTES = 8

FOREVER = timedelta(days=365)
"""How long to wait for a piece, which may not come for hours; a sender that died ends the wait."""


@dataclass(frozen=True)
class Letter:
    """A piece and the stage it is for; the number of stages stands for who hands out results.

    Attributes:
        place: Which stage.
        piece: `None` for the last letter of a connection.
    """

    place: int
    piece: Piece | None


class Letters:
    """Sends and receives; a rank sends from one thread, and receives from each other in one.

    Tensors travel by the CPU. What is sent is pickled but for tensors: ranks of one job trust each
    other.

    Args:
        rank: This one.
        group: All ranks, on gloo.
        global_ranks: Of each rank, its number in the default group.
    """

    def __init__(self, rank: int, group: dist.ProcessGroup, global_ranks: Sequence[int]) -> None:
        self._rank, self._group, self._global_ranks = rank, group, global_ranks

    def send(self, receiver: int, letter: Letter) -> None:
        """Send a letter, and wait until it is on its way.

        Raises:
            RuntimeError: The receiver is gone, or does not take it in time.
        """
        piece = letter.piece
        if piece is not None and piece.ready is not None:
            piece.ready.synchronize()
        values = () if piece is None else piece.values
        tensors = [v.cpu().contiguous() for v in values if isinstance(v, Tensor)]
        shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        others = [None if isinstance(value, Tensor) else (value,) for value in values]
        error = None if piece is None or piece.error is None else self._packed(piece.error)
        number = None if piece is None else piece.number
        head = pickle.dumps((letter.place, number, error, shapes, others))
        self._send_bytes(head, receiver)
        for tensor in tensors:
            if tensor.numel():
                self._send(tensor, receiver)

    def receive(self, sender: int) -> Letter:
        """Wait for the next letter of a sender.

        Raises:
            RuntimeError: The sender is gone.
        """
        place, number, error, shapes, others = pickle.loads(self._receive_bytes(sender))
        tensors = []
        for shape, dtype in shapes:
            tensor = torch.empty(shape, dtype=dtype)
            if tensor.numel():
                self._receive(tensor, sender)
            tensors.append(tensor)
        if number is None:
            return Letter(place, None)
        rest = iter(tensors)
        values = tuple(next(rest) if other is None else other[0] for other in others)
        found = None if error is None else pickle.loads(error)
        return Letter(place, Piece(number, values, error=found))

    def _packed(self, error: BaseException) -> bytes:
        """An error with its traceback as a note; one that cannot be pickled, in words."""
        if error.__traceback__ is not None:  # raised here, not merely passed on
            text = "".join(traceback.format_exception(error))
            error.add_note(f"on rank {self._rank}:\n{text}")
        try:
            packed = pickle.dumps(error)
            pickle.loads(packed)
        except Exception:  # noqa: BLE001 (whatever a class's own pickling raises)
            words = RuntimeError(f"{type(error).__name__}: {error}")
            for note in getattr(error, "__notes__", ()):
                words.add_note(note)
            return pickle.dumps(words)
        return packed

    def _send_bytes(self, data: bytes, receiver: int) -> None:
        whole = len(data).to_bytes(LENGTH_BYTES, "big") + data
        first, rest = whole[:HEAD_BYTES].ljust(HEAD_BYTES, b"\0"), whole[HEAD_BYTES:]
        self._send(_as_tensor(first), receiver)
        if rest:
            self._send(_as_tensor(rest), receiver)

    def _receive_bytes(self, sender: int) -> bytes:
        first = self._received_bytes(HEAD_BYTES, sender)
        length = LENGTH_BYTES + int.from_bytes(first[:LENGTH_BYTES], "big")
        rest = length - HEAD_BYTES
        whole = first + self._received_bytes(rest, sender) if rest > 0 else first
        return whole[LENGTH_BYTES:length]

    def _received_bytes(self, length: int, sender: int) -> bytes:
        data = torch.empty(length, dtype=torch.uint8)
        self._receive(data, sender)
        return data.numpy().tobytes()

    def _send(self, tensor: Tensor, receiver: int) -> None:
        dist.send(tensor, self._global_ranks[receiver], group=self._group)

    def _receive(self, tensor: Tensor, sender: int) -> None:
        work: Any = dist.irecv(tensor, self._global_ranks[sender], group=self._group)
        work.wait(FOREVER)


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
