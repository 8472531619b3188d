"""Skip connections that go from the partition that stashes them to the one that pops them."""

from __future__ import annotations

from .namespace import Namespace
from .skippable import pop, skippable, stash, verify_skippables

__all__ = ["Namespace", "pop", "skippable", "stash", "verify_skippables"]
