"""Device check: refuse a measurement on a device that torch cannot use."""

from __future__ import annotations

import torch

from ...core.errors import InvalidInput


def check_device(device: str) -> str:
    """Return the device if this torch can use it, else raise `InvalidInput`."""
    if not device.startswith("cuda"):
        return device
    if not torch.cuda.is_available():
        raise InvalidInput(
            f"this torch sees no CUDA device, so {device} cannot be measured here; "
            "measure on the device cpu, or where there is a GPU",
            field="/profiling/device",
        )
    count, (_, _, index) = torch.cuda.device_count(), device.partition(":")
    if int(index or 0) >= count:
        raise InvalidInput(
            f"there is no {device} here; the {count} CUDA devices are cuda:0 to cuda:{count - 1}",
            field="/profiling/device",
        )
    return device
