"""Where skippable layers put the tensors they stash, and find those they pop."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from .routes import SkipName


class SkipTracker:
    """Skip tensors stashed and not popped yet.

    Args:
        tensors: Those stashed elsewhere.
    """

    def __init__(self, tensors: dict[SkipName, Tensor | None] | None = None) -> None:
        self.tensors = {} if tensors is None else tensors


class _Current(threading.local):
    """Per thread, because partitions on other devices run at the same time."""

    tracker: SkipTracker | None = None


# Global because a layer is called with its input alone, whether in a pipeline or not.
_current = _Current()


def current_skip_tracker() -> SkipTracker:
    """This thread's; outside of a pipeline there is one for good."""
    if _current.tracker is None:
        _current.tracker = SkipTracker()
    return _current.tracker


@contextmanager
def use_skip_tracker(tracker: SkipTracker) -> Iterator[None]:
    """Make it this thread's inside."""
    before, _current.tracker = _current.tracker, tracker
    try:
        yield
    finally:
        _current.tracker = before
