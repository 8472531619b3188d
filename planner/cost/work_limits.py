"""Most work that so many devices can do if a plan is to be better than one that is known.

Where there are too many stages to list, these limits leave out those that no better plan has: a
stage with its work, the work in front of it and that behind it need more devices than there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ROUNDING = 1e-9
"""Slack, relatively: no stage may be left out by rounding alone."""


@dataclass(frozen=True, eq=False)
class WorkLimits:
    """Limits on seconds of work, forward and backward on the device profiled.

    Attributes:
        of_stage: Most work of a stage with 0, 1, ... replicas, shape (replicas + 1,), ascending.
        of_devices: Most work of any stages on 0, 1, ... devices, shape (devices + 1,), ascending.
    """

    of_stage: NDArray[np.float64]
    of_devices: NDArray[np.float64]

    @classmethod
    def of(cls, of_replicas: NDArray[np.float64], num_devices: int, whole_s: float) -> WorkLimits:
        """Build the limits from those of a stage with 1, 2, ... replicas.

        The most work of d devices is the best way to share them among stages: O(d x replicas).
        """
        of_stage = np.concatenate([[0.0], np.minimum(of_replicas, whole_s) * (1 + ROUNDING)])
        of_devices = np.zeros(num_devices + 1)
        for count in range(1, num_devices + 1):
            most = min(count, len(of_stage) - 1)
            # The last stage takes 1 to `most` devices, the others what is left.
            rest = of_devices[count - most : count][::-1]
            of_devices[count] = (rest + of_stage[1 : most + 1]).max()
        return cls(of_stage, of_devices)

    @property
    def longest_s(self) -> float:
        """Return the most work of any stage."""
        return float(self.of_stage[-1])

    def allows_cut(self, front_s: NDArray[np.float64], whole_s: float) -> NDArray[np.bool_]:
        """Return True for the cuts with so much work in front that a better plan may have."""
        front = np.searchsorted(self.of_devices, front_s)
        behind = np.searchsorted(self.of_devices, np.maximum(whole_s - front_s, 0.0))
        allowed: NDArray[np.bool_] = front + behind < len(self.of_devices)
        return allowed
