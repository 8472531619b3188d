"""CPU threads the measured model runs on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Run torch's operations on so many threads meanwhile; `None` leaves their number."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
