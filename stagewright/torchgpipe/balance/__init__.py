"""Where to cut a sequential module, asked as torchgpipe asks and solved exactly."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from . import blockpartition
from .profile import profile_sizes, profile_times

__all__ = ["balance_by_size", "balance_by_time"]

Device = torch.device | int | str


def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Any,
    *,
    timeout: float = 1.0,
    device: Device | None = None,
) -> list[int]:
    """Layers per partition so that the slowest partition is as fast as it can be.

    Args:
        partitions: How many.
        module: Its layers are copied and timed one by one, in training mode.
        sample: An input, a tensor or a tuple of tensors.
        timeout: Seconds after which no new round of measurements is begun.
        device: Where to measure; `None` for the current CUDA device, or where the module is
            without one.

    Returns:
        The number of layers in each partition, for `GPipe`.

    Raises:
        ValueError: More partitions than layers, or some parameter already has a gradient.
    """
    times = profile_times(module, sample, timeout, _device(device, module))
    return [len(block) for block in blockpartition.solve(times, partitions)]


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Any,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device | None = None,
) -> list[int]:
    """Layers per partition so that the largest partition needs as little memory as it can.

    A layer's size is what its forward leaves in memory for a micro-batch, plus its parameters
    times ``param_scale``.

    Args:
        partitions: How many.
        module: Its layers are copied and run one by one, in training mode.
        input: A batch as it will be trained, a tensor or a tuple of tensors.
        chunks: Micro-batches it will be split into.
        param_scale: Copies of parameters in memory: 2 to 3 for SGD, 4 to 5 for Adam.
        device: Where to run; `None` for the current CUDA device, or where the module is without
            one.

    Returns:
        The number of layers in each partition, for `GPipe`.

    Raises:
        ValueError: More partitions than layers.
    """
    sizes = profile_sizes(module, input, chunks, param_scale, _device(device, module))
    return [len(block) for block in blockpartition.solve(sizes, partitions)]


def _device(device: Device | None, module: nn.Module) -> torch.device:
    if device is not None:
        return torch.device(device)
    if torch.cuda.is_available():
        return torch.device("cuda")
    parameter = next(module.parameters(), None)
    return torch.device("cpu") if parameter is None else parameter.device
