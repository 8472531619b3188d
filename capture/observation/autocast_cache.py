"""Weights that autocast converts once for many forwards, not once for each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch


@contextmanager
def keep_conversions() -> Iterator[None]:
    """Keep what `convert_once` converts until this ends; weights must not change meanwhile.

    torch lets go of its converted weights when the outermost autocast ends, so that each forward
    would convert them anew and its graph keep a copy of its own.
    """
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        # Also inside a caller's autocast: its weights are about to change.
        torch.clear_autocast_cache()


def convert_once(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    """Return an autocast that shares converted weights with the others inside `keep_conversions`.

    Without gradients each is converted anew: torch would give a later forward the same tensor,
    which does not lead back to its weight.
    """
    return torch.autocast(device.type, dtype, cache_enabled=torch.is_grad_enabled())
