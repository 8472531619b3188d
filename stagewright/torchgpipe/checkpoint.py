"""Checkpointing queries under torchgpipe's module name; the runtime implements them."""

from __future__ import annotations

from ..runtime.local.checkpoint_state import is_checkpointing, is_recomputing

__all__ = ["is_checkpointing", "is_recomputing"]
