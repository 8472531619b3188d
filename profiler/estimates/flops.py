"""Cost of one ATen operation: its class, FLOPs and bytes moved.

A multiplication and an addition are two FLOPs. Bytes are those that have to be read and written at
least once; what stays in caches between operations is not known. Shapes suffice: the tensors may
be on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ...capture.program.program import storage_key, tensors_of

OperationClass = Literal[
    "matmul", "attention", "convolution", "elementwise", "reduction", "embedding"
]
OPERATION_CLASSES: tuple[OperationClass, ...] = get_args(OperationClass)


@dataclass(frozen=True)
class Cost:
    """One operation: its class, FLOPs of matrix products (0 if it has none) and bytes moved.

    Attributes:
        shape: Of a product as (batch, m, n, k), of a convolution as that of its implicit product,
            of attention as (batch x heads, queries, keys, width); empty where it has none.
        is_backward: Of attention and reductions, whose backward kernels are others.
    """

    kind: OperationClass
    flops: int
    bytes: int
    shape: tuple[int, ...] = ()
    is_backward: bool = False


FREE = frozenset(
    ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias",
     "lift_fresh", "_unsafe_view", "_reshape_alias", "set_", "resize_", "sym_size", "record_stream")
)  # fmt: skip
"""Allocate or rename; nothing is computed."""

_PRODUCTS: dict[str, OperationClass] = {
    "mm": "matmul", "addmm": "matmul", "bmm": "matmul", "baddbmm": "matmul", "addmv": "matmul",
    "mv": "matmul", "dot": "matmul", "_scaled_mm": "matmul", "_grouped_mm": "matmul",
    "mkldnn_linear": "matmul",
    "convolution": "convolution", "_convolution": "convolution",
    "cudnn_convolution": "convolution", "mkldnn_convolution": "convolution",
    "convolution_overrideable": "convolution", "convolution_backward": "convolution",
    "_scaled_dot_product_flash_attention": "attention",
    "_scaled_dot_product_flash_attention_backward": "attention",
    "_scaled_dot_product_flash_attention_for_cpu": "attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "attention",
    "_scaled_dot_product_efficient_attention": "attention",
    "_scaled_dot_product_efficient_attention_backward": "attention",
    "_scaled_dot_product_cudnn_attention": "attention",
    "_scaled_dot_product_cudnn_attention_backward": "attention",
}  # fmt: skip

_REDUCTIONS = frozenset(
    ("native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm",
     "_fused_rms_norm_backward", "native_group_norm", "native_group_norm_backward",
     "native_batch_norm", "native_batch_norm_backward", "_native_batch_norm_legit",
     "_native_batch_norm_legit_no_training", "cudnn_batch_norm", "cudnn_batch_norm_backward",
     "batch_norm_backward", "_batch_norm_with_update",
     "_softmax", "_softmax_backward_data", "_safe_softmax", "_log_softmax",
     "_log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward",
     "nll_loss2d_backward", "mse_loss", "mse_loss_backward", "sum", "mean", "amax", "amin", "max",
     "min", "argmax", "var", "var_mean", "std", "norm", "linalg_vector_norm", "logsumexp", "prod",
     "any", "all", "topk", "sort", "cumsum", "bincount", "histc",
     "max_pool2d_with_indices", "max_pool2d_with_indices_backward", "avg_pool2d",
     "avg_pool2d_backward", "_adaptive_avg_pool2d", "_adaptive_avg_pool2d_backward")
)  # fmt: skip
"""Several elements go into one: normalisations, softmax, losses, sums, pooling."""

_GATHERS = frozenset(("embedding", "index", "index_select", "gather", "take", "_unsafe_index"))
"""Read as many elements of a table as they return."""

_SCATTERS = frozenset(
    ("embedding_dense_backward", "index_put", "index_put_", "_index_put_impl_", "index_add",
     "index_add_", "scatter", "scatter_", "scatter_add", "scatter_add_", "_unsafe_index_put")
)  # fmt: skip
"""Write as many elements of a table as they are given; the rest of it once at most."""


WINOGRAD = 2.25
"""Multiplications of a 3 x 3 filter saved by tiles of 2 x 2 outputs (Lavin and Gray 2016)."""


def cost_of(
    operation: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
    *,
    winograd: bool = False,
) -> Cost | None:
    """Return the cost of a call of an operation; `None` if nothing is computed.

    With ``winograd``, 3 x 3 filters are applied by Winograd's algorithm, as cuDNN does with float32
    products outside tensor cores.
    """
    name = operation._schema.name.rpartition("::")[2]
    if name in FREE or _is_view(operation):
        return None
    given = (*args, *kwargs.values())
    if name in _PRODUCTS:
        flops = product_flops(name, operation, args, kwargs, result)
        if winograd and _suits_winograd(name, args):
            flops = int(flops / WINOGRAD)
        return Cost(
            _PRODUCTS[name],
            flops,
            _moved(given) + _moved((result,)),
            product_shape(name, operation, args, kwargs, result),
            name.endswith("backward"),
        )
    if name in _GATHERS:
        # Every element is read from the table and written to the result.
        return Cost("embedding", 0, 2 * _moved((result,)) + _indices(given))
    if name in _SCATTERS:
        # The table once; for every element its value read, and its place read and written.
        values = _scattered(name, args)
        return Cost("embedding", 0, _moved((result,)) + 3 * values + _indices(given))
    moved = _moved(given) + _moved((result,))
    if name in _REDUCTIONS:
        return Cost("reduction", 0, moved, is_backward="backward" in name)
    return Cost("elementwise", 0, moved)


def product_flops(
    name: str,
    operation: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
) -> int:
    if "attention" in name:
        return _attention_flops(name, operation, args, kwargs)
    if name == "_grouped_mm":
        return _grouped_mm_flops(args[0], args[1])
    if name in ("mv", "addmv", "dot"):
        return 2 * max(tensor.numel() for tensor in tensors_of(args))
    if name == "mkldnn_linear":
        return int(2 * args[0].numel() * args[1].shape[0])
    if name == "convolution":
        return _convolution_flops(args[0], args[1], result, transposed=args[6])
    if name == "convolution_backward":
        # The mask asks for the gradients of input, weight and bias; that of the bias is a sum.
        gradient, values, weight, mask = args[0], args[1], args[2], args[10]
        one = _convolution_flops(values, weight, gradient, transposed=args[7])
        return one * (bool(mask[0]) + bool(mask[1]))
    formula: Callable[..., int] = flop_registry[operation.overloadpacket]
    return int(formula(*args, **kwargs, out_val=result))


def product_shape(
    name: str,
    operation: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
) -> tuple[int, ...]:
    """Return the shape by which a product's tiles are counted; empty if it has no such shape."""
    if "attention" in name:
        values = _named(operation, args, kwargs)
        query, key = values["query"], values["key"]
        return (prod(query.shape[:-2]), query.shape[-2], key.shape[-2], query.shape[-1])
    if name in ("convolution", "convolution_backward"):
        backward = name == "convolution_backward"
        weight, output = (args[2], args[0]) if backward else (args[1], result)
        groups = args[9] if backward else args[8]
        positions = prod(output.shape) // output.shape[1]
        return (groups, positions, weight.shape[0] // groups, prod(weight.shape[1:]))
    tensors = [tensor for tensor in args if isinstance(tensor, Tensor)]
    if name in ("addmm", "baddbmm"):
        tensors = tensors[1:]
    if name in ("mm", "addmm", "bmm", "baddbmm"):
        left, right = tensors[:2]
        return (prod(left.shape[:-2]), left.shape[-2], right.shape[-1], left.shape[-1])
    return ()


def _convolution_flops(values: Tensor, weight: Tensor, result: Tensor, *, transposed: bool) -> int:
    """Count a convolution's FLOPs: every filter at every output (transposed: input) position.

    Of the weight's shape (out, in / groups, *kernel), or (in, out / groups, *kernel) if
    transposed, all but the first belong to one position. Each gradient takes as many
    (`torch.utils.flop_counter` counts that of a grouped weight more than once).
    """
    positions = values if transposed else result
    return 2 * positions.numel() * prod(weight.shape[1:])


def _suits_winograd(name: str, args: tuple[Any, ...]) -> bool:
    """Return whether it is a dense 3 x 3 convolution of stride 1, or the gradient of one."""
    if name == "convolution":
        weight, stride, dilation, groups = args[1], args[3], args[5], args[8]
    elif name == "convolution_backward":
        weight, stride, dilation, groups = args[2], args[4], args[6], args[9]
    else:
        return False
    return tuple(weight.shape[2:]) == (3, 3) and {*stride, *dilation, groups} == {1}


def _grouped_mm_flops(left: Tensor, right: Tensor) -> int:
    """Products of groups of rows with a matrix each: every row meets one matrix.

    Shapes: (rows, k) and (groups, k, n) forward; (m, rows) and (rows, n) for the gradient of the
    weights, where the groups partition the inner dimension; the usual batched product otherwise.
    """
    if left.dim() == 2 and right.dim() == 3:
        return 2 * left.shape[0] * left.shape[1] * right.shape[2]
    if left.dim() == 3 and right.dim() == 2:
        return 2 * left.shape[1] * left.shape[2] * right.shape[1]
    return 2 * left.numel() * right.shape[-1]


def _attention_flops(
    name: str, operation: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int:
    """Two products forward; five backward, the scores' being computed again (Dao et al. 2022).

    Half of them where attention is causal and the kernel skips what is masked.
    """
    values = _named(operation, args, kwargs)
    query, key, value = values["query"], values["key"], values["value"]
    rows = prod(query.shape[:-1])
    keys, width, value_width = key.shape[-2], query.shape[-1], value.shape[-1]
    if name.endswith("_backward"):
        flops = 2 * rows * keys * (3 * width + 2 * value_width)
    else:
        flops = 2 * rows * keys * (width + value_width)
    return int(flops // 2 if values.get("is_causal") else flops)


def _named(
    operation: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return a call's arguments by name."""
    names = [argument.name for argument in operation._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _is_view(operation: torch._ops.OpOverload) -> bool:
    """Return whether every result is a view of an argument and nothing is written."""
    schema = operation._schema
    return bool(schema.returns) and all(
        # An in-place operation returns an alias as well, but writes to it.
        entry.alias_info is not None and not entry.alias_info.is_write
        for entry in schema.returns
    )


def _moved(values: Iterable[Any]) -> int:
    """Sum the stored bytes of the tensors among values; expanded dimensions count once."""
    return sum(_size(tensor) for tensor in _distinct(values))


def _distinct(values: Iterable[Any]) -> list[Tensor]:
    """List each tensor once, because memory passed twice is read once."""
    found: dict[tuple[int, int, int], Tensor] = {}
    for tensor in tensors_of(tuple(values)):
        found.setdefault(
            (storage_key(tensor), int(tensor.storage_offset()), tensor.numel()), tensor
        )
    return list(found.values())


def _size(tensor: Tensor) -> int:
    count = prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return count * tensor.element_size()


def _indices(values: Iterable[Any]) -> int:
    return sum(_size(t) for t in _distinct(values) if not t.is_floating_point())


def _scattered(name: str, args: tuple[Any, ...]) -> int:
    floating = [t for t in tensors_of(args) if t.is_floating_point()]
    if name == "embedding_dense_backward" or len(floating) < 2:
        return _size(floating[0]) if floating else 0
    return _size(floating[-1])
