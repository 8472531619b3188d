"""torchgpipe's public names, on this library's planner and runtime.

A script written for torchgpipe changes its imports::

    from stagewright.torchgpipe import GPipe
    from stagewright.torchgpipe.balance import balance_by_time

    balance = balance_by_time(2, model, sample)
    model = GPipe(model, balance, chunks=8)

``docs/guides/from-torchgpipe.md`` lists the deliberate differences.
"""

from __future__ import annotations

from .. import __version__ as __version__
from ..runtime.local.checkpoint_state import is_checkpointing, is_recomputing
from .gpipe import GPipe

__all__ = ["GPipe", "is_checkpointing", "is_recomputing"]
