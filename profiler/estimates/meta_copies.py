"""A model and its sample without values: copies on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...capture.sample import check_module
from ...core.errors import InvalidInput
from .device_kernels import FunctionMode

META = torch.device("meta")


def without_values(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Copy a model to the meta device without allocating; tied parameters stay tied.

    Floating tensors are of that type, those included that modules hold as plain attributes.
    """
    check_module(model)
    # `deepcopy` takes what the memo has by `id` instead of copying it: values are never copied,
    # and a parameter under two names is found twice and stays one.
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise InvalidInput(
                f"{name} has no shape yet: its module is lazy; run the model once on a sample "
                "before it is estimated"
            )
        moved = parameter.detach().to(META)
        memo[id(parameter)] = nn.Parameter(moved, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to(META)
    with _PlainTensors(dtype):
        copied = copy.deepcopy(model, memo)
    return copied.to(dtype)


def on_meta(value: Any, dtype: torch.dtype) -> Any:
    """Copy a structure of tensors to the meta device, floating ones in the given dtype."""
    if isinstance(value, Tensor):
        kind = dtype if value.is_floating_point() else value.dtype
        return torch.empty(value.shape, dtype=kind, device=META)
    if isinstance(value, dict):
        return {name: on_meta(item, dtype) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(on_meta(item, dtype) for item in value)
    return value


class _PlainTensors(FunctionMode):
    """Inside, tensors are copied without values, and what autograd made (a cache) as well."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if function is not Tensor.__deepcopy__:
            return function(*args, **kwargs)
        tensor = args[0]
        moved = on_meta(tensor, self._dtype)
        # `Tensor.__deepcopy__` refuses what is no leaf; such a cache is copied as a constant.
        return moved.requires_grad_(tensor.is_leaf and tensor.requires_grad)
