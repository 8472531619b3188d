"""Balance a model as torchgpipe users know it, solved exactly."""

from __future__ import annotations

import copy
from numbers import Integral
from typing import TYPE_CHECKING, Any

from .core.errors import InvalidInput
from .core.profile.profile import Profile
from .core.requests.requests import ProfilingOptions
from .core.units import name_type
from .planner.heuristics.chain_partition import balance

if TYPE_CHECKING:
    import torch
    from torch import nn


def balance_by_time(
    partitions: int,
    module: nn.Module,
    sample: Any,
    *,
    timeout: float = 1.0,
    device: torch.device | str | None = None,
) -> list[int]:
    """Layers per partition so that the slowest partition is as fast as it can be.

    Args:
        partitions: Number of partitions.
        module: An ``nn.Sequential``, whose children are the layers, or any module that can be
            captured.
        sample: A micro-batch: one argument, a tuple of them, or a dict of keywords.
        timeout: Seconds to spend on repeats.
        device: Measure a copy of the module there; `None` measures it where it is.

    Returns:
        Layer counts, one a partition: the smallest possible largest part by forward plus
        backward time, and among those the smallest sum of squares.

    Raises:
        InvalidInput: More partitions than layers, or a sample the module does not take.
        CaptureError: The module cannot be captured.
    """
    _check(partitions, module)
    return balance_profile(_measure(module, sample, timeout, device), partitions, by="time")


def balance_by_size(
    partitions: int,
    module: nn.Module,
    sample: Any,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: torch.device | str | None = None,
) -> list[int]:
    """Layers per partition so that the largest partition needs as little memory as it can.

    A layer's size is the activations it keeps for one micro-batch, plus its parameters times
    ``param_scale``.

    Args:
        partitions: Number of partitions.
        module: See `balance_by_time`.
        sample: A mini-batch that will be split into ``chunks`` micro-batches.
        chunks: Micro-batches per mini-batch.
        param_scale: 2 for parameters and gradients, 3 with a momentum, 4 with Adam's moments.
        device: See `balance_by_time`.

    Returns:
        Layer counts, one a partition.

    Raises:
        InvalidInput: More partitions than layers, or a sample the module does not take.
        CaptureError: The module cannot be captured.
    """
    _check(partitions, module)
    profile = _measure(module, sample, 0.0, device)
    return balance_profile(profile, partitions, by="size", chunks=chunks, param_scale=param_scale)


def balance_profile(
    profile: Profile,
    partitions: int,
    *,
    by: str = "time",
    chunks: int = 1,
    param_scale: float = 2.0,
) -> list[int]:
    """Balance a stored profile; equal profiles give equal answers.

    Layers between which no cut is legal stay together.
    """
    groups = [[0]]
    for boundary in profile.boundaries:
        if boundary.legal:
            groups.append([])
        groups[-1].append(boundary.after + 1)

    def cost(index: int) -> float:
        layer = profile.layers[index]
        if by == "time":
            return layer.forward.median_s + layer.backward.median_s
        return layer.saved_activation_bytes / chunks + layer.layer.parameter_bytes * param_scale

    sizes = balance([sum(cost(index) for index in group) for group in groups], partitions)
    counts = []
    start = 0
    for size in sizes:
        counts.append(sum(len(group) for group in groups[start : start + size]))
        start += size
    return counts


def _check(partitions: int, module: nn.Module) -> None:
    if isinstance(partitions, bool) or not isinstance(partitions, Integral) or partitions < 1:
        raise InvalidInput(f"partitions is {partitions!r}; give a number from 1 up")
    if not hasattr(module, "named_parameters"):
        raise InvalidInput(f"the module is {name_type(module)}, not a torch.nn.Module")


def _measure(
    module: nn.Module, sample: Any, budget_s: float, device: torch.device | str | None
) -> Profile:
    from .profiler.measure.profile import profile

    if device is not None:
        module = copy.deepcopy(module).to(device)
    return profile(module, sample, options=ProfilingOptions(budget_s=max(budget_s, 1e-3)))
