"""Rules by which operations are split: layouts of inputs in, layout of the output out.

A rule takes a `NodeCall` of whose inputs at least one is divided, or which may start a split, and
returns the `NodeSplit`; it raises `Unsplittable` where no exact split is known. To support another
operation add a rule to `FUNCTIONS` or `MODULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..program.mode_dependent import AttentionDropout
from ..program.program import storages_of
from .layout import (
    NeedsParts,
    NodeCall,
    NodeSplit,
    Shard,
    Unsplittable,
    base_name,
    check_divisible,
    shape,
)

Rule = Callable[[NodeCall], NodeSplit]


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
    if layout is None:
        _check_start(call)
        call.divide(weight, Shard(1 - rows, call.parts))
        if bias is not None:
            call.divide(bias, Shard(0, call.parts))
        return NodeSplit(Shard(len(shape(call.node)) - 1, call.parts))
    if layout.dim != last:
        raise Unsplittable("is divided along its batch or sequence")
    call.divide(weight, Shard(rows, layout.parts))
    change = NodeSplit(None, sums=True, bias=bias)
    if bias is not None:
        change.arguments[2] = None
    return change


def _check_start(call: NodeCall) -> None:
    if not call.may_start:
        raise Unsplittable("starts no split")


def split_linear_module(call: NodeCall) -> NodeSplit:
    x = call.argument(0)
    last, layout = len(shape(x)) - 1, call.layout(x)
    if layout is None:
        _check_start(call)
        call.divide_own("weight", Shard(0, call.parts))
        call.divide_own("bias", Shard(0, call.parts))
        return NodeSplit(Shard(last, call.parts))
    if layout.dim != last:
        raise Unsplittable("is divided along its batch or sequence")
    call.divide_own("weight", Shard(1, layout.parts))
    bias = "bias" if call.module.bias is not None else None
    return NodeSplit(None, call=F.linear, sums=True, bias=bias)


def _split_batched(call: NodeCall, first: fx.Node, second: fx.Node) -> NodeSplit:
    """Split a product of two activations along a dimension that both have before the last two."""
    left, right = call.layout(first), call.layout(second)
    chosen = left or right
    dims = len(shape(call.node))
    if chosen is None or len(shape(first)) != dims or len(shape(second)) != dims:
        raise Unsplittable("multiplies values of different ranks")
    if chosen.dim >= dims - 2:
        raise Unsplittable("is divided along a dimension of the matrices")
    return _along(call, (first, second), chosen)


def _along(
    call: NodeCall, operands: Sequence[Any], chosen: Shard, dims: int | None = None
) -> NodeSplit:
    """Split an operation that works along dimension ``chosen.dim`` of its output independently.

    Operands are aligned from the right. Whole ones are sliced unless they are broadcast.
    """
    change = NodeSplit(chosen)
    dims = len(shape(call.node)) if dims is None else dims
    size = 0
    for operand in operands:
        if not isinstance(operand, fx.Node):
            continue
        own = shape(operand)
        dim = chosen.dim - (dims - len(own))
        layout = call.layout(operand)
        if layout is not None:
            if dim < 0 or layout != chosen.at(dim):
                raise Unsplittable("reads values divided in different ways")
            size = own[dim]
        elif dim >= 0 and own[dim] != 1:
            size = own[dim]
            if call.holds_weight(operand):
                call.divide(operand, chosen.at(dim))
            else:
                change.slices[operand] = chosen.at(dim)
    check_divisible(size, chosen.parts, call.degree)
    return change


def split_elementwise(call: NodeCall) -> NodeSplit:
    """Split an operation that computes each element of its output from one of each input."""
    operands = [*call.node.args, *call.node.kwargs.values()]
    dims = len(shape(call.node))
    divided = [
        layout.at(layout.dim + dims - len(shape(each)))
        for each in operands
        if isinstance(each, fx.Node) and (layout := call.layout(each)) is not None
    ]
    if not divided:
        raise Unsplittable("starts no split")
    _check_in_place(call, operands[0])
    return _along(call, operands, divided[0])


def _check_in_place(call: NodeCall, first: Any) -> None:
    """Check that a value changed in place is a part that nothing else reads."""
    name = base_name(call.node)
    inplace = name.endswith("_") and not name.endswith("__")
    inplace |= call.node.op == "call_module" and getattr(call.module, "inplace", False)
    if not inplace:
        return
    if call.layout(first) is None:
        raise Unsplittable("changes a whole value in place")
    memory = storages_of([first])
    views = {n for n in call.node.graph.nodes if not memory.isdisjoint(storages_of([n]))}
    if views - {first, call.node} - set(call.node.users) or set(first.users) != {call.node}:
        raise Unsplittable("changes memory in place that others read")


def split_dropout(call: NodeCall) -> NodeSplit:
    """Split dropout: every rank draws the mask of the whole value, and takes its part."""
    change = split_elementwise(call)
    change.noise = True
    return change


def split_channelwise(call: NodeCall) -> NodeSplit:
    """Split what treats channels, dimension 1, by themselves, such as pooling."""
    layout = _channels(call)
    return NodeSplit(layout)


def _channels(call: NodeCall) -> Shard:
    layout = call.layout(call.argument(0))
    if layout is None or layout.dim != 1:
        raise Unsplittable("is divided along other dimensions than channels")
    return layout


def split_batch_norm(call: NodeCall) -> NodeSplit:
    layout = _channels(call)
    for name in ("weight", "bias", "running_mean", "running_var"):
        call.divide_own(name, layout.at(0))
    return NodeSplit(layout)


def split_group_norm(call: NodeCall) -> NodeSplit:
    layout, module = _channels(call), call.module
    assert isinstance(module, nn.GroupNorm)
    if layout.parts or module.num_groups % call.degree:
        raise Unsplittable(f"has {module.num_groups} groups to be divided by {call.degree}")
    for name in ("weight", "bias"):
        call.divide_own(name, Shard(0))
    groups, eps = module.num_groups // call.degree, module.eps

    def group_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        return F.group_norm(x, groups, weight, bias, eps)

    return NodeSplit(layout, call=group_norm)


def split_convolution_module(call: NodeCall) -> NodeSplit:
    """Split a convolution by output channels, input channels or groups."""
    module: Any = call.module
    if module.padding_mode != "zeros" or module.transposed:
        raise Unsplittable("pads or transposes")
    layout = call.layout(call.argument(0))
    convolve = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(module.kernel_size)]
    stride, padding, dilation = module.stride, module.padding, module.dilation

    def convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return convolve(x, weight, bias, stride, padding, dilation, groups)

    groups = module.groups
    if groups == 1:
        if layout is None:
            _check_start(call)
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
        _check_start(call)
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
    _check_start(call)
    call.divide_own("weight", Shard(0))
    return NodeSplit(
        None, call=LookUp(module.num_embeddings // call.degree, module.padding_idx), sums=True
    )


class LookUp:
    """Look-up of a rank's rows of a table."""

    __name__ = "look_up"

    def __init__(self, rows: int, padding_idx: int | None, rank: int = 0) -> None:
        self.rows, self.padding_idx, self.rank = rows, padding_idx, rank

    def of_rank(self, rank: int) -> LookUp:
        return LookUp(self.rows, self.padding_idx, rank)

    def __call__(self, indices: Tensor, weight: Tensor) -> Tensor:
        local = indices - self.rank * self.rows
        is_here = (local >= 0) & (local < self.rows)
        if self.padding_idx is not None:  # its row has no gradient
            is_padding = indices == self.padding_idx
            found = F.embedding(local.where(is_here, 0), weight)
            found = torch.where(is_padding.unsqueeze(-1), found.detach(), found)
        else:
            found = F.embedding(local.where(is_here, 0), weight)
        return found * is_here.unsqueeze(-1)


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
    change = _along(call, (query, key, value, mask), chosen, dims)
    if call.node.op == "call_module":
        change.draws = bool(call.module.dropout_p)
    else:
        change.draws = bool(call.argument(4, "dropout_p", 0.0))
    return change


def split_softmax(call: NodeCall) -> NodeSplit:
    layout = call.layout(call.argument(0))
    dim = call.argument(1, "dim", -1)
    if layout is None or layout.dim == dim % len(shape(call.node)):
        raise Unsplittable("runs along the divided dimension")
    return NodeSplit(layout)


def split_softmax_module(call: NodeCall) -> NodeSplit:
    layout, dim = call.layout(call.argument(0)), getattr(call.module, "dim", None)
    if layout is None or dim is None or layout.dim == dim % len(shape(call.node)):
        raise Unsplittable("runs along the divided dimension")
    return NodeSplit(layout)


def split_reduction(call: NodeCall) -> NodeSplit:
    """Split a sum, mean or the like over dimensions that are not divided."""
    x = call.argument(0)
    layout, dims = call.layout(x), call.argument(1, "dim")
    rank = len(shape(x))
    if layout is None or (not dims and dims != 0):
        raise Unsplittable("reduces the divided dimension")
    reduced = {dim % rank for dim in (dims if isinstance(dims, list | tuple) else [dims])}
    if layout.dim in reduced:
        raise Unsplittable("reduces the divided dimension")
    kept = len(shape(call.node)) == rank
    return NodeSplit(
        layout if kept else layout.at(layout.dim - sum(d < layout.dim for d in reduced))
    )


def split_grouped_product(call: NodeCall) -> NodeSplit:
    """Split the products of experts, ``x[tokens of e] @ weight[e]``, inside each expert."""
    x, weight = call.argument(0), call.argument(1)
    layout = call.layout(x)
    if layout is None:
        _check_start(call)
        call.divide(weight, Shard(2, call.parts))
        return NodeSplit(Shard(len(shape(call.node)) - 1, call.parts))
    if layout.dim != len(shape(x)) - 1:
        raise Unsplittable("is divided along its tokens")
    call.divide(weight, Shard(1, layout.parts))
    return NodeSplit(None, sums=True)


def split_view(call: NodeCall) -> NodeSplit:
    """Split a view that keeps the divided dimension first among those it is merged with."""
    x = call.argument(0)
    layout = call.layout(x)
    assert layout is not None
    target, moved = _through_view(shape(x), shape(call.node), layout, call.degree)
    change = NodeSplit(moved)
    position = 1
    if base_name(call.node) in SIZED:
        sizes = list(call.argument(position, "size", call.argument(position, "shape")))
        if sizes[target] != -1:
            sizes[target] = shape(call.node)[target] // call.degree
        change.arguments[position] = sizes
        if position >= len(call.node.args):
            raise Unsplittable("has its sizes by name")
    return change


SIZED = ("view", "reshape", "_unsafe_view", "expand")


def _through_view(
    before: Sequence[int], after: Sequence[int], layout: Shard, degree: int
) -> tuple[int, Shard]:
    """Return the dimension that is divided after a view, and its layout."""
    for inner, outer in _groups(before, after):
        if layout.dim not in inner:
            continue
        leading = [dim for dim in inner if before[dim] != 1]
        if not leading or leading[0] != layout.dim:
            raise Unsplittable("merges the divided dimension behind another")
        behind = [dim for dim in outer if after[dim] != 1]
        first = behind[0]
        size = prod(before[dim] for dim in inner)
        if not layout.parts and after[first] % degree == 0:
            return first, Shard(first)
        if len(inner) == len(outer) == 1 or after[first] == before[layout.dim]:
            return first, layout.at(first)
        # Fused queries, keys and values: a leading dimension of parts, each divided by itself.
        parts = (size // after[first],) * after[first]
        if len(leading) > 1 or len(behind) < 2 or after[behind[1]] % degree:
            raise Unsplittable("takes the divided dimension apart unevenly")
        if layout.parts != parts:
            raise NeedsParts(parts)
        return behind[1], Shard(behind[1])
    raise Unsplittable("has no dimension like the divided one")


def _groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Match runs of dimensions of equal products, in order."""
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(before) or j < len(after):
        inner, outer = [], []
        left = right = 1
        if i < len(before):
            inner.append(i)
            left, i = before[i], i + 1
        if j < len(after):
            outer.append(j)
            right, j = after[j], j + 1
        while left != right:
            if left < right:
                if i >= len(before):
                    raise Unsplittable("changes the number of elements")
                inner.append(i)
                left, i = left * before[i], i + 1
            else:
                if j >= len(after):
                    raise Unsplittable("changes the number of elements")
                outer.append(j)
                right, j = right * after[j], j + 1
        found.append((inner, outer))
    return found


def split_expand(call: NodeCall) -> NodeSplit:
    x = call.argument(0)
    layout = call.layout(x)
    assert layout is not None
    dim = layout.dim + len(shape(call.node)) - len(shape(x))
    sizes = list(call.argument(1, "size"))
    if sizes[dim] != -1:
        sizes[dim] = shape(call.node)[dim] // call.degree
    return NodeSplit(layout.at(dim), arguments={1: sizes})


def split_transpose(call: NodeCall) -> NodeSplit:
    x = call.argument(0)
    layout, rank = call.layout(x), len(shape(x))
    assert layout is not None
    name = base_name(call.node)
    if name == "permute":
        order = [dim % rank for dim in call.argument(1, "dims")]
    else:
        pair = (0, 1) if name in ("t", "numpy_T") else (call.argument(1), call.argument(2))
        first, second = (dim % rank for dim in pair)
        order = list(range(rank))
        order[first], order[second] = second, first
    return NodeSplit(layout.at(order.index(layout.dim)))


def split_unsqueeze(call: NodeCall) -> NodeSplit:
    layout = call.layout(call.argument(0))
    assert layout is not None
    dim = call.argument(1, "dim") % len(shape(call.node))
    return NodeSplit(layout.at(layout.dim + (dim <= layout.dim)))


def split_squeeze(call: NodeCall) -> NodeSplit:
    x = call.argument(0)
    layout, rank = call.layout(x), len(shape(x))
    assert layout is not None
    dims = call.argument(1, "dim")
    if dims is None:
        raise Unsplittable("removes dimensions that depend on sizes")
    removed = {d % rank for d in (dims if isinstance(dims, list | tuple) else [dims])}
    removed = {dim for dim in removed if shape(x)[dim] == 1}
    return NodeSplit(layout.at(layout.dim - sum(dim < layout.dim for dim in removed)))


def split_slice(call: NodeCall) -> NodeSplit:
    """Split a slice or selection along another dimension than the divided one."""
    x = call.argument(0)
    layout, rank = call.layout(x), len(shape(x))
    assert layout is not None
    dim = call.argument(1, "dim", 0) % rank
    if dim == layout.dim:
        raise Unsplittable("takes a part of the divided dimension")
    lost = base_name(call.node) == "select" and dim < layout.dim
    return NodeSplit(layout.at(layout.dim - lost))


def split_parts(call: NodeCall) -> NodeSplit:
    """Split ``split`` or ``chunk``, of the divided dimension part by part."""
    x = call.argument(0)
    layout = call.layout(x)
    assert layout is not None
    values = call.node.meta.get("val") or []
    dim = call.argument(2, "dim", 0) % len(shape(x))
    if dim != layout.dim:
        return NodeSplit([layout] * len(values))
    sizes = tuple(int(value.shape[dim]) for value in values)
    check_divisible(sum(sizes), sizes, call.degree)
    if layout.parts != sizes:
        raise NeedsParts(sizes)
    change = NodeSplit([Shard(dim)] * len(sizes))
    given = call.argument(1)
    if base_name(call.node) != "chunk":
        change.arguments[1] = (
            given // call.degree
            if isinstance(given, int)
            else [each // call.degree for each in given]
        )
    return change


def split_getitem(call: NodeCall) -> NodeSplit:
    layouts, index = call.layouts.get(call.argument(0)), call.argument(1)
    if not isinstance(layouts, list) or not isinstance(index, int):
        raise Unsplittable("indexes a divided value")
    return NodeSplit(layouts[index])


def split_concatenation(call: NodeCall) -> NodeSplit:
    values, dim = call.argument(0), call.argument(1, "dim", 0)
    rank = len(shape(call.node))
    chosen = next(x for x in map(call.layout, values) if x is not None)
    if dim % rank == chosen.dim:
        raise Unsplittable("joins the divided dimension")
    return _along(call, values, chosen)


ELEMENTWISE = ("to", "_to_copy", "type_as", "contiguous", "clone", "detach", "alias")
"""Operators that treat elements by themselves, besides those that torch tags ``pointwise``."""

LIKE = ("zeros_like", "ones_like", "full_like", "empty_like")
REDUCTIONS = ("sum", "mean", "amax", "amin", "prod", "var", "std", "logsumexp", "argmax", "argmin")
DROPOUT = ("dropout", "feature_dropout")

FUNCTIONS: dict[str, Rule] = {
    **dict.fromkeys((*ELEMENTWISE, *LIKE), split_elementwise),
    **dict.fromkeys(REDUCTIONS, split_reduction),
    **dict.fromkeys(DROPOUT, split_dropout),
    "linear": split_linear,
    "addmm": split_addmm,
    **dict.fromkeys(("matmul", "mm", "bmm"), split_matmul),
    "scaled_dot_product_attention": split_attention,
    **dict.fromkeys(("softmax", "_softmax", "log_softmax", "_log_softmax"), split_softmax),
    **dict.fromkeys(("view", "reshape", "_unsafe_view", "flatten", "unflatten"), split_view),
    "expand": split_expand,
    **dict.fromkeys(("transpose", "permute", "t"), split_transpose),
    "unsqueeze": split_unsqueeze,
    "squeeze": split_squeeze,
    **dict.fromkeys(("slice", "select"), split_slice),
    **dict.fromkeys(("split", "chunk", "split_with_sizes"), split_parts),
    "getitem": split_getitem,
    **dict.fromkeys(("cat", "concat"), split_concatenation),
    **dict.fromkeys(("grouped_mm_fallback", "_grouped_mm"), split_grouped_product),
    **dict.fromkeys(
        ("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "upsample_nearest2d"), split_channelwise
    ),
}
"""Rules of operators, by name without namespace and overload."""

MODULES: dict[type[nn.Module], Rule] = {
    nn.Linear: split_linear_module,
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), split_convolution_module),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), split_batch_norm),
    nn.GroupNorm: split_group_norm,
    nn.Embedding: split_embedding_module,
    nn.Softmax: split_softmax_module,
    **dict.fromkeys(
        (
            nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.Identity, nn.ELU,
            nn.LeakyReLU, nn.Hardswish, nn.Hardsigmoid, nn.Softplus, nn.SELU, nn.CELU,
        ),
        split_elementwise,
    ),
    nn.Dropout: split_dropout,
    **dict.fromkeys((nn.Dropout2d, nn.Dropout3d), split_dropout),
    **dict.fromkeys(
        (
            nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.Upsample,
            nn.ZeroPad2d,
        ),
        split_channelwise,
    ),
}  # fmt: skip
"""Rules of modules that are called whole, by their exact type."""

STARTS = ("linear", "addmm", "matmul", "mm", "grouped_mm_fallback", "_grouped_mm")
"""Operators that may start a split: their output is divided though their inputs are whole."""

STARTING_MODULES = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding)


def find_rule(call: NodeCall) -> Rule | None:
    """Return the rule for an operation; `None` if there is none."""
    if call.node.op == "call_module":
        kind = type(call.module)
        if kind is AttentionDropout:
            return split_attention
        return MODULES.get(kind)
    if call.node.op != "call_function":
        return None
    if (rule := FUNCTIONS.get(base_name(call.node))) is not None:
        return rule
    tags = getattr(call.node.target, "tags", ())
    is_random = torch.Tag.nondeterministic_seeded in tags
    return split_elementwise if torch.Tag.pointwise in tags and not is_random else None


def may_start(call: NodeCall) -> bool:
    """Return True if an operation whose inputs are whole may divide its output."""
    if call.node.op == "call_module":
        return isinstance(call.module, STARTING_MODULES)
    return call.node.op == "call_function" and base_name(call.node) in STARTS
