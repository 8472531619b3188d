"""Weights lent to a stage for the length of one step."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from torch import Tensor


class Loans:
    """What other stages lent, by tied group; those of the latest step only."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._step = -1
        self._weights: dict[int, Tensor] = {}

    def add(self, step: int, group: int, weight: Tensor) -> None:
        """A weight has come; one of an earlier step comes too late and is dropped."""
        with self._lock:
            if step > self._step:
                self._step, self._weights = step, {}
            if step == self._step:
                self._weights[group] = weight

    def has(self, step: int, groups: Iterable[int]) -> bool:
        """Whether everything needed for a step has come."""
        with self._lock:
            return not (wanted := set(groups)) or (
                step == self._step and wanted <= self._weights.keys()
            )

    def current(self) -> Mapping[int, Tensor]:
        """The weights of the latest step."""
        with self._lock:
            return MappingProxyType(dict(self._weights))

    def clear(self) -> None:
        """Forget them."""
        with self._lock:
            self._weights = {}
