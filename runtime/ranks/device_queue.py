"""What devices that queue work ask of the host."""

from __future__ import annotations

import torch

QUEUEING = {"cuda"}
"""Device types that run work later than the host launches it; tests add the CPU's."""


def queues_work(device: torch.device) -> bool:
    """Return True if the host launches a device's work without waiting for it."""
    return device.type in QUEUEING
