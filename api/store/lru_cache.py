"""A thread-safe LRU cache bounded by the total size of its values."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Generic, TypeVar

Value = TypeVar("Value")


class LruCache(Generic[Value]):
    """Immutable values, of which the least recently used are dropped first.

    Args:
        capacity: Total size of all values, in the unit passed to `put`.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: OrderedDict[str, tuple[Value, int]] = OrderedDict()
        self._size = 0
        self._lock = Lock()

    def get(self, key: str) -> Value | None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: str, value: Value, size: int) -> None:
        """Add a value and drop old ones to make room; one beyond the capacity is not kept."""
        if size > self._capacity:
            return
        with self._lock:
            _, replaced_size = self._entries.pop(key, (None, 0))
            self._size += size - replaced_size
            self._entries[key] = (value, size)
            while self._size > self._capacity:
                _, (_, freed) = self._entries.popitem(last=False)
                self._size -= freed
