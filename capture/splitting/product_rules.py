"""Rules for products by weights: linear layers, convolutions, tables, experts and attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from .elementwise_rules import split_along
from .layout import NodeCall, NodeSplit, Shard, Unsplittable, check_divisible, shape


def split_linear(call: NodeCall) -> NodeSplit:
    """Split ``x @ weight.T + bias`` by columns if ``x`` is whole, by rows if it is divided."""
    x, weight, bias = call.argument(0), call.argument(1), call.argument(2)
    return _split_product(call, x, weight, bias, rows=1)


def split_addmm(call: NodeCall) -> NodeSplit:
    """Split ``bias + x @ weight``."""
    if call.node.kwargs or len(call.node.args) > 3:
        raise Unsplittable("scales its operands")
    bias, x, weight = call.node.args
    change = _split_product(call, x, weight, bias, rows=0)
    if change.sums:
        change.call, change.arguments = torch.matmul, {0: x, 1: weight, 2: REMOVED}
    return change


REMOVED = object()
"""Stands for an argument that is left out."""


def split_matmul(call: NodeCall) -> NodeSplit:
    """Split a product by a weight as a linear layer, other products by a dimension of batches."""
    first, second = call.argument(0), call.argument(1)
    if call.holds_weight(second) and len(shape(second)) == 2:
        return _split_product(call, first, second, None, rows=0)
    return _split_batched(call, first, second)


def _split_product(call: NodeCall, x: Any, weight: Any, bias: Any, *, rows: int) -> NodeSplit:
    """Split a product; dimension ``rows`` of the weight is the one that is summed over."""
    last, layout = len(shape(x)) - 1, call.layout(x)
    if call.layout(weight) is not None:
        raise Unsplittable("multiplies by a divided value")
    if bias is not None and not (call.holds_weight(bias) and len(shape(bias)) == 1):
        raise Unsplittable("adds what is not a bias")
    if layout is None:
        call.check_start()
        call.divide(weight, Shard(1 - rows, call.parts))
        if bias is not None:
            call.divide(bias, Shard(0, call.parts))
        return NodeSplit(Shard(len(shape(call.node)) - 1, call.parts))
    if layout.dim != last:
        raise Unsplittable("is divided along its batch or sequence")
    call.divide(weight, Shard(rows, layout.parts))
    change = NodeSplit(None, sums=True, by_rows=True, bias=bias)
    if bias is not None:
        change.arguments[2] = None
    return change


def split_linear_module(call: NodeCall) -> NodeSplit:
    x = call.argument(0)
    last, layout = len(shape(x)) - 1, call.layout(x)
    if layout is None:
        call.check_start()
        call.divide_own("weight", Shard(0, call.parts))
        call.divide_own("bias", Shard(0, call.parts))
        return NodeSplit(Shard(last, call.parts))
    if layout.dim != last:
        raise Unsplittable("is divided along its batch or sequence")
    call.divide_own("weight", Shard(1, layout.parts))
    bias = "bias" if call.module.bias is not None else None
    return NodeSplit(None, call=F.linear, sums=True, by_rows=True, bias=bias)


def _split_batched(call: NodeCall, first: fx.Node, second: fx.Node) -> NodeSplit:
    """Split a product of two activations along a dimension that both have before the last two."""
    left, right = call.layout(first), call.layout(second)
    chosen = left or right
    dims = len(shape(call.node))
    if chosen is None or len(shape(first)) != dims or len(shape(second)) != dims:
        raise Unsplittable("multiplies values of different ranks")
    if chosen.dim >= dims - 2:
        raise Unsplittable("is divided along a dimension of the matrices")
    return split_along(call, (first, second), chosen)


def split_convolution_module(call: NodeCall) -> NodeSplit:
    """Split a convolution by output channels, input channels or groups."""
    module: Any = call.module
    if module.padding_mode != "zeros" or module.transposed:
        raise Unsplittable("pads or transposes")
    if len(shape(call.node)) != len(module.kernel_size) + 2:
        raise Unsplittable("has no dimension of samples before its channels")
    layout = call.layout(call.argument(0))
    convolve = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(module.kernel_size)]
    stride, padding, dilation = module.stride, module.padding, module.dilation

    def convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return convolve(x, weight, bias, stride, padding, dilation, groups)

    groups = module.groups
    if groups == 1:
        if layout is None:
            call.check_start()
            call.divide_own("weight", Shard(0))
            call.divide_own("bias", Shard(0))
            return NodeSplit(Shard(1))
        if layout.dim != 1:
            raise Unsplittable("is divided along other dimensions than channels")
        call.divide_own("weight", Shard(1, layout.parts))
        bias = "bias" if module.bias is not None else None
        return NodeSplit(None, call=convolution, sums=True, bias=bias)
    if groups % call.degree:
        raise Unsplittable(f"has {groups} groups to be divided by {call.degree}")
    groups //= call.degree
    change = NodeSplit(Shard(1), call=convolution)
    if layout is None:
        call.check_start()
        change.slices[call.argument(0)] = Shard(1)
    elif layout != Shard(1):
        raise Unsplittable("is divided along other dimensions than channels")
    call.divide_own("weight", Shard(0))
    call.divide_own("bias", Shard(0))
    return change


def split_embedding_module(call: NodeCall) -> NodeSplit:
    """Split a table by its rows: each rank looks up those it holds, and the results are summed."""
    module: Any = call.module
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise Unsplittable("changes its table, or has gradients that depend on all rows")
    if call.layout(call.argument(0)) is not None:
        raise Unsplittable("looks up divided indices")
    call.check_start()
    call.divide_own("weight", Shard(0))
    rows = LookUp(module.num_embeddings // call.degree, call.degree, module.padding_idx)
    return NodeSplit(None, call=rows, sums=True, by_rows=True)


class LookUp:
    """Look-up of a rank's rows of a table."""

    __name__ = "look_up"

    def __init__(self, rows: int, degree: int, padding_idx: int | None, rank: int = 0) -> None:
        self.rows, self.degree, self.padding_idx, self.rank = rows, degree, padding_idx, rank

    def of_rank(self, rank: int) -> LookUp:
        return LookUp(self.rows, self.degree, self.padding_idx, rank)

    def __call__(self, indices: Tensor, weight: Tensor) -> Tensor:
        count = self.rows * self.degree
        is_known = (indices >= 0) & (indices < count)
        torch._assert_async(is_known.all(), f"an index is none of {count} rows of a table")
        local = indices - self.rank * self.rows
        is_here = (local >= 0) & (local < self.rows)
        if self.padding_idx is not None:  # its row has no gradient
            is_padding = indices == self.padding_idx
            found = F.embedding(local.where(is_here, 0), weight)
            found = torch.where(is_padding.unsqueeze(-1), found.detach(), found)
        else:
            found = F.embedding(local.where(is_here, 0), weight)
        return found.masked_fill(~is_here.unsqueeze(-1), 0)


def split_grouped_product(call: NodeCall) -> NodeSplit:
    """Split the products of experts, ``x[tokens of e] @ weight[e]``, inside each expert."""
    x, weight = call.argument(0), call.argument(1)
    layout = call.layout(x)
    if layout is None:
        call.check_start()
        call.divide(weight, Shard(2, call.parts))
        return NodeSplit(Shard(len(shape(call.node)) - 1, call.parts))
    if layout.dim != len(shape(x)) - 1:
        raise Unsplittable("is divided along its tokens")
    call.divide(weight, Shard(1, layout.parts))
    return NodeSplit(None, sums=True)


def split_attention(call: NodeCall) -> NodeSplit:
    """Split attention by heads, the third dimension from behind."""
    query, key, value = (call.argument(i) for i in range(3))
    mask = call.argument(3, "attn_mask")
    dims = len(shape(query))
    heads = dims - 3
    chosen = Shard(heads)
    wrong = [x for x in (query, key, value) if call.layout(x) not in (None, chosen)]
    if wrong or heads < 0:
        raise Unsplittable("is divided along other dimensions than heads", wrong)
    divided = [x for x in (query, key, value) if call.layout(x) is not None]
    if not divided:
        raise Unsplittable("has a divided mask")
    for each in (query, key, value):
        check_divisible(shape(each)[heads], (), call.degree)
    change = split_along(call, (query, key, value, mask), chosen, dims)
    if call.node.op == "call_module":
        change.draws = bool(call.module.dropout_p)
    else:
        change.draws = bool(call.argument(4, "dropout_p", 0.0))
    return change
