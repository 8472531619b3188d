"""What travels through the stages, and where it waits for its turn."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

Values = tuple[Any, ...]


def always() -> bool:
    """Of a piece that nobody can withdraw."""
    return True


@dataclass(frozen=True)
class Piece:
    """A micro-batch on its way.

    Attributes:
        number: Its place among all pieces, from 0 without gaps.
        values: Flat tensors, and on the way out other values; none once it failed.
        ready: When the values are computed; `None` if they are, as on a CPU.
        error: Why it has no values; stages pass it on, so that no other piece waits for it.
        is_wanted: Whether anybody still waits for it; no stage works on it if not.
    """

    number: int
    values: Values = ()
    ready: torch.cuda.Event | None = None
    error: BaseException | None = None
    is_wanted: Callable[[], bool] = always

    def made(self, values: Values, ready: torch.cuda.Event | None) -> Self:
        """The same piece behind a stage."""
        return replace(self, values=values, ready=ready)

    def failed(self, error: BaseException) -> Self:
        """The same piece, without values."""
        return replace(self, values=(), ready=None, error=error)


class Inbox:
    """Pieces for one replica of a stage, taken in the order of their numbers.

    They may be put in any order: the replicas of the stage before overtake each other. How many
    there are at once is for those to bound who number them.

    Args:
        first: Number of the first piece dealt to this replica.
        step: From one to the next: the number of replicas.
    """

    def __init__(self, first: int = 0, step: int = 1) -> None:
        self._next, self._step = first, step
        self._pieces: dict[int, Piece] = {}
        self._is_closed = False
        self._changed = threading.Condition()

    def put(self, piece: Piece) -> None:
        """Leave a piece here."""
        with self._changed:
            self._pieces[piece.number] = piece
            self._changed.notify_all()

    def take(self) -> Piece | None:
        """Wait for the next piece; `None` once the inbox is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._next in self._pieces)
            if self._is_closed:
                return None
            piece = self._pieces.pop(self._next)
            self._next += self._step
            return piece

    def close(self) -> None:
        """Let nobody wait here any more; pieces still here are dropped."""
        with self._changed:
            self._is_closed = True
            self._pieces.clear()
            self._changed.notify_all()
