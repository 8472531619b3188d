"""Fills of a model's buffers and constants in a serialized graph, which has no weights."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.graph.tensors import (
    MAX_WRITTEN_VALUES,
    RANDN_DTYPES,
    CausalFill,
    ConstantFill,
    Fill,
    IntegerFill,
    NormalFill,
    RangeFill,
    ValuesFill,
)
from ..sample import dtype_name

MAX_WRITTEN_FLOATS = 256
"""Floating-point constants are written out only if they are as small as a table of frequencies;
larger ones may be learned values, which must not leave the machine."""

MAX_LOOKED_AT = 2**26
"""Largest tensor whose elements are inspected."""

STATISTICS = {"running_mean": 0, "running_var": 1, "num_batches_tracked": 0}
"""Initial values of normalisation statistics; the values gathered from data are not disclosed."""

_POSITIONS = (torch.int64, torch.int32, torch.int16, torch.bool)


def choose_fill(name: str, tensor: Tensor) -> Fill:
    """Choose a fill with which operations on a buffer or constant work and take as long."""
    own = name.rpartition(".")[2]
    if own in STATISTICS:
        return ConstantFill(value=STATISTICS[own])
    floating = dtype_name(tensor.dtype) in RANDN_DTYPES
    if tensor.is_meta or tensor.numel() > MAX_LOOKED_AT:
        return NormalFill() if floating else ConstantFill(value=0)
    value = tensor.detach().cpu()
    if value.numel() == 0:
        return ConstantFill(value=0)
    return _floating(value) if floating else _integers(value)


def _floating(value: Tensor) -> Fill:
    if value.is_complex() or not bool(value.float().isfinite().all()):
        return NormalFill()
    if bool((value == value.flatten()[0]).all()):
        return ConstantFill(value=float(value.flatten()[0]))
    if value.numel() <= MAX_WRITTEN_FLOATS:
        return ValuesFill(values=tuple(value.double().flatten().tolist()))
    return NormalFill(std=float(value.double().std()))


def _integers(value: Tensor) -> Fill:
    if bool((value == value.flatten()[0]).all()):
        return ConstantFill(value=value.flatten()[0].item())
    if value.dtype not in _POSITIONS:
        return _range_of(value)
    if value.dim() >= 2 and bool((value == torch.ones_like(value).tril()).all()):
        return CausalFill()
    if value.dtype != torch.bool and value.shape[-1] > 1:
        row = value.reshape(-1, value.shape[-1])
        step = row[0, 1] - row[0, 0]
        expected = row[0, 0] + step * torch.arange(value.shape[-1])
        if bool((row == expected).all()):
            return RangeFill(start=int(row[0, 0]), step=int(step))
    if value.numel() <= MAX_WRITTEN_VALUES:
        return ValuesFill(values=tuple(value.flatten().tolist()))
    return _range_of(value)


def _range_of(value: Tensor) -> Fill:
    numbers = value.to(torch.int64)
    return IntegerFill(low=int(numbers.min()), high=int(numbers.max()) + 1)
