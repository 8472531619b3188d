"""Device kernels: emulate a device's kernel choice where the meta device chooses others.

On the meta device attention always takes its products apart (about 11 times the saved bytes of a
fused kernel at 512 tokens), and dropout keeps its mask in the type of its input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ...core.cluster.accelerators import Backend

aten = torch.ops.aten

_ATTENTION = (
    functional.scaled_dot_product_attention,
    aten.scaled_dot_product_attention.default,
)
_DROPOUT = (functional.dropout, aten.dropout.default, torch.dropout)


class FunctionMode(TorchFunctionMode):
    """Inside, every function of torch goes through `call`."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self.call(func, args, kwargs or {})

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Handle a call of a torch function."""
        raise NotImplementedError


class DeviceKernels(FunctionMode):
    """Inside, attention and dropout on meta tensors run the kernels a device would run."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self._backend = backend

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if function in _ATTENTION:
            chosen = self._attention(*args, **kwargs)
            if chosen is not None:
                return chosen
        elif function in _DROPOUT and self._backend != "cpu":
            return _fused_dropout(*args, **kwargs)
        return function(*args, **kwargs)

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
