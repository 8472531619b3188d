"""Thread-local storage of stashed skip tensors."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from .namespace import SkipName


class SkipTracker:
    """Skip tensors that are stashed and not yet popped."""

    def __init__(self, tensors: dict[SkipName, Tensor | None] | None = None) -> None:
        self.tensors = {} if tensors is None else tensors


class _Current(threading.local):
    """Tracker of one thread; partitions on other devices run on other threads."""

    tracker: SkipTracker | None = None


# Global, because a layer's forward receives only its input.
_current = _Current()


def current_skip_tracker() -> SkipTracker:
    """Return this thread's tracker; outside a pipeline, a permanent one."""
    if _current.tracker is None:
        _current.tracker = SkipTracker()
    return _current.tracker


@contextmanager
def use_skip_tracker(tracker: SkipTracker) -> Iterator[None]:
    """Use a tracker on this thread inside the block."""
    before, _current.tracker = _current.tracker, tracker
    try:
        yield
    finally:
        _current.tracker = before
