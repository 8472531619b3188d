"""Whether the code that asks is run for the first time under checkpointing, or once more."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Flags(threading.local):
    """Per thread, because stages on other devices run at the same time."""

    checkpointing = False
    recomputing = False


# Global because a model's code asks from wherever it is, and has nothing to ask.
_flags = _Flags()


def is_checkpointing() -> bool:
    """Whether this forward keeps nothing for the backward, and will be run again for it."""
    return _flags.checkpointing


def is_recomputing() -> bool:
    """Whether this forward is the second run of one that kept nothing.

    What a module changes besides its output (a counter, a running statistic) it should change
    in the first run only::

        def forward(self, x):
            if not is_recomputing():
                self.calls += 1
            return x
    """
    return _flags.recomputing


@contextmanager
def checkpointing() -> Iterator[None]:
    """`is_checkpointing` says yes inside."""
    before, _flags.checkpointing = _flags.checkpointing, True
    try:
        yield
    finally:
        _flags.checkpointing = before


@contextmanager
def recomputing() -> Iterator[None]:
    """`is_recomputing` says yes inside."""
    before, _flags.recomputing = _flags.recomputing, True
    try:
        yield
    finally:
        _flags.recomputing = before
