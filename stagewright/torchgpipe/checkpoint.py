"""Where torchgpipe has the questions a model may ask; the answers are the runtime's."""

from __future__ import annotations

from ..runtime.local.checkpoint_state import is_checkpointing, is_recomputing

__all__ = ["is_checkpointing", "is_recomputing"]
