"""Rules for operations that treat elements, channels or slices of a dimension by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..program.program import storages_of
from .layout import NodeCall, NodeSplit, Shard, Unsplittable, base_name, check_divisible, shape


def split_along(
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
    if base_name(call.node) == "type_as":  # of the other it reads the type alone
        call.layout(operands.pop())
    dims = len(shape(call.node))
    divided = [
        layout.at(layout.dim + dims - len(shape(each)))
        for each in operands
        if isinstance(each, fx.Node) and (layout := call.layout(each)) is not None
    ]
    if not divided:
        raise Unsplittable("starts no split")
    _check_in_place(call, operands[0])
    return split_along(call, operands, divided[0])


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
    if len(shape(call.argument(0))) < 4:  # pooling and padding take three for channels first
        raise Unsplittable("has no dimension of samples before its channels")
    return NodeSplit(_channels(call))


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


def split_norm(call: NodeCall) -> NodeSplit:
    """Split a norm over the last dimensions along one of the others."""
    return _split_norm(call, call.argument(1, "normalized_shape"))


def split_norm_module(call: NodeCall) -> NodeSplit:
    module: Any = call.module
    change, sizes, eps = (
        _split_norm(call, module.normalized_shape),
        module.normalized_shape,
        module.eps,
    )

    def norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        if isinstance(module, nn.LayerNorm):
            return F.layer_norm(x, sizes, weight, bias, eps)
        return F.rms_norm(x, sizes, weight, eps)

    change.call = norm
    return change


def _split_norm(call: NodeCall, sizes: Sequence[int]) -> NodeSplit:
    x = call.argument(0)
    layout = call.layout(x)
    if layout is None or layout.dim >= len(shape(x)) - len(sizes):
        raise Unsplittable("runs along the divided dimension")
    return NodeSplit(layout)


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
    # Of ``var(x, unbiased)`` the second argument is no dimension.
    if layout is None or isinstance(dims, bool) or (not dims and dims != 0):
        raise Unsplittable("reduces the divided dimension")
    reduced = {dim % rank for dim in (dims if isinstance(dims, list | tuple) else [dims])}
    if layout.dim in reduced:
        raise Unsplittable("reduces the divided dimension")
    kept = len(shape(call.node)) == rank
    return NodeSplit(
        layout if kept else layout.at(layout.dim - sum(d < layout.dim for d in reduced))
    )


def split_concatenation(call: NodeCall) -> NodeSplit:
    values, dim = call.argument(0), call.argument(1, "dim", 0)
    rank = len(shape(call.node))
    chosen = next(x for x in map(call.layout, values) if x is not None)
    if dim % rank == chosen.dim:
        raise Unsplittable("joins the divided dimension")
    return split_along(call, values, chosen)
