"""Skip connections sent directly from the partition that stashes to the one that pops."""

from __future__ import annotations

from .namespace import Namespace
from .skippable import pop, skippable, stash, verify_skippables

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
