"""Balanced partitions of a sequential module, with torchgpipe's interface, solved exactly."""

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
    """Choose the layers per partition that minimize the time of the slowest partition.

    Args:
        partitions: Number of partitions.
        module: Its layers are copied and timed one by one, in training mode.
        sample: An input, a tensor or a tuple of tensors.
        timeout: Seconds after which no new round of measurements starts.
        device: Device to measure on; by default the current CUDA device or, without CUDA, the
            module's device.

    Returns:
        The number of layers in each partition, for `GPipe`.

    Raises:
        ValueError: There are more partitions than layers, or a parameter has a gradient.
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
    """Choose the layers per partition that minimize the memory of the largest partition.

    A layer's size is the memory its forward retains for a micro-batch, plus its parameters times
    ``param_scale``.

    Args:
        partitions: Number of partitions.
        module: Its layers are copied and run one by one, in training mode.
        input: A training batch, a tensor or a tuple of tensors.
        chunks: Number of micro-batches per batch.
        param_scale: Copies of parameters in memory: 2 to 3 for SGD, 4 to 5 for Adam.
        device: Device to run on; by default the current CUDA device or, without CUDA, the
            module's device.

    Returns:
        The number of layers in each partition, for `GPipe`.

    Raises:
        ValueError: There are more partitions than layers.
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
