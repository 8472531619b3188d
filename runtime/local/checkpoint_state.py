"""Thread-local flags that tell a model's code about checkpointing and recomputation."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal


class _Flags(threading.local):
    """Flags of one thread; stages on other devices run on other threads."""

    checkpointing = False
    recomputing = False


# Global, because a model's forward has no object to ask.
_flags = _Flags()


def is_checkpointing() -> bool:
    """Return True in a forward that keeps no activations and will be recomputed."""
    return _flags.checkpointing


def is_recomputing() -> bool:
    """Return True in the recomputation of a checkpointed forward.

    A module should apply side effects (a counter, a running statistic) in the first run only::

        def forward(self, x):
            if not is_recomputing():
                self.calls += 1
            return x
    """
    return _flags.recomputing


@contextmanager
def set_flag(flag: Literal["checkpointing", "recomputing"]) -> Iterator[None]:
    """Make `is_checkpointing` or `is_recomputing` return True inside the block."""
    before = getattr(_flags, flag)
    setattr(_flags, flag, True)
    try:
        yield
    finally:
        setattr(_flags, flag, before)
