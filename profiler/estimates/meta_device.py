"""The meta device: copies without values, and the kernels that a real device would choose."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from ...capture.sample import check_module
from ...core.cluster.accelerators import Backend
from ...core.errors import InvalidInput
from ...core.graph.tensors import SampleTensor, TensorSpec

aten = torch.ops.aten

_ATTENTION = (functional.scaled_dot_product_attention, aten.scaled_dot_product_attention.default)
_DROPOUT = (functional.dropout, aten.dropout.default, torch.dropout)


class DeviceKernels(TorchFunctionMode):
    """Inside, attention and dropout on meta tensors run the kernels a device would run."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self._backend = backend

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ATTENTION:
            chosen = self._attention(*args, **kwargs)
            if chosen is not None:
                return chosen
        elif func in _DROPOUT and self._backend != "cpu":
            return _fused_dropout(*args, **kwargs)
        return func(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor | None:
        """Return the fused kernel's output; `None` where the device does not fuse either."""
        # The fused kernels take (batch, heads, length, width), with one width for all three.
        if query.dim() != 4 or value.shape[-1] != query.shape[-1]:
            return None
        if attn_mask is not None and attn_mask.requires_grad:
            return None
        if enable_gqa:
            groups = query.shape[1] // key.shape[1]
            key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            # They add the mask to the scores, so it has their type; on meta it has no values.
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
        if self._backend == "cpu":
            if dropout_p:
                return None
            output: Tensor = aten._scaled_dot_product_flash_attention_for_cpu.default(
                query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale
            )[0]
            return output
        # The flash kernel has neither masks nor float32; the memory-efficient one has both.
        if attn_mask is None and query.dtype in (torch.float16, torch.bfloat16):
            fused: Tensor = aten._scaled_dot_product_flash_attention.default(
                query, key, value, dropout_p, is_causal, scale=scale
            )[0]
            return fused
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
        efficient: Tensor = aten._scaled_dot_product_efficient_attention.default(
            query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
        )[0]
        return efficient


def _fused_dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **_: Any
) -> Tensor:
    """Emulate the kernel that saves its mask as one byte per element."""
    if not training or p == 0:
        return input
    output: Tensor = torch.native_dropout(input, p, True)[0]
    return output


META = torch.device("meta")


def empty_meta(like: SampleTensor | TensorSpec) -> Tensor:
    """Return a tensor of the shape and type described, without memory."""
    return torch.empty(like.shape, dtype=getattr(torch, like.dtype), device=META)


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


class _PlainTensors(TorchFunctionMode):
    """Inside, tensors are copied without values, and what autograd made (a cache) as well."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor = args[0]
        moved = on_meta(tensor, self._dtype)
        # `Tensor.__deepcopy__` refuses what is no leaf; such a cache is copied as a constant.
        return moved.requires_grad_(tensor.is_leaf and tensor.requires_grad)
