"""What was read lately, so that it need not be read again."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Lately(Generic[Value]):
    """Values that never change, the latest used of them; for several threads.

    Args:
        capacity: Of all values kept together, in the unit of their sizes.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept: OrderedDict[str, tuple[Value, int]] = OrderedDict()
        self._size = 0
        self._lock = Lock()

    def get(self, key: str) -> Value | None:
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                return None
            self._kept.move_to_end(key)
            return found[0]

    def put(self, key: str, value: Value, size: int) -> None:
        """Keep a value, and give up the longest unused ones; one beyond capacity is not kept."""
        if size > self._capacity:
            return
        with self._lock:
            before = self._kept.pop(key, None)
            self._size += size - (0 if before is None else before[1])
            self._kept[key] = (value, size)
            while self._size > self._capacity:
                _, (_, freed) = self._kept.popitem(last=False)
                self._size -= freed
