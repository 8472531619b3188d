"""Rules for operations that move, merge or take apart dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

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

MAX_PARTS = 256
"""Parts of a dimension at most, such as the sequences of a batch: each is moved by itself."""


def split_view(call: NodeCall) -> NodeSplit:
    """Split a view that takes the divided dimension apart, or merges it with others."""
    x = call.argument(0)
    layout = call.layout(x)
    assert layout is not None
    # Several readers, such as a router and its experts, would each gather what is merged.
    may_merge = len(call.node.users) == 1
    target, moved = _through_view(shape(x), shape(call.node), layout, call.degree, may_merge)
    change, name = NodeSplit(moved), base_name(call.node)
    if name == "flatten":
        return change
    position, first = (2, call.argument(1) % len(shape(x))) if name == "unflatten" else (1, 0)
    given = call.node.args[position] if position < len(call.node.args) else None
    if not isinstance(given, list | tuple):
        raise Unsplittable("has its sizes by name, or none")
    sizes, at = list(given), target - first
    if 0 <= at < len(sizes) and sizes[at] != -1:
        sizes[at] = shape(call.node)[target] // call.degree
    change.arguments[position] = sizes
    return change


def _through_view(
    before: Sequence[int], after: Sequence[int], layout: Shard, degree: int, may_merge: bool
) -> tuple[int, Shard]:
    """Return the dimension that is divided after a view, and its layout."""
    for inner, outer in _groups(before, after):
        if layout.dim not in inner:
            continue
        leading = [dim for dim in inner if before[dim] != 1]
        behind = [dim for dim in outer if after[dim] != 1]
        if not leading or leading[0] != layout.dim:
            in_front = prod(before[dim] for dim in inner if dim < layout.dim)
            if not may_merge or layout.parts or len(behind) != 1 or in_front > MAX_PARTS:
                raise Unsplittable("merges the divided dimension behind another")
            # Such as sequences, one behind the other: each is divided by itself.
            return behind[0], Shard(behind[0], (after[behind[0]] // in_front,) * in_front)
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
        pair = (0, 1) if name == "t" else (call.argument(1), call.argument(2))
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


def split_unbind(call: NodeCall) -> NodeSplit:
    """Split an unbinding of another dimension than the divided one."""
    x = call.argument(0)
    layout = call.layout(x)
    assert layout is not None
    dim = call.argument(1, "dim", 0) % len(shape(x))
    if dim == layout.dim:
        raise Unsplittable("takes the divided dimension apart")
    return NodeSplit([layout.at(layout.dim - (dim < layout.dim))] * shape(x)[dim])


def split_repeat_interleave(call: NodeCall) -> NodeSplit:
    """Split a repetition of each slice, so many times, along any dimension.

    Ranks hold consecutive slices, as keys and values of grouped-query attention, and what those
    make is consecutive too.
    """
    x, repeats = call.argument(0), call.argument(1, "repeats")
    layout, dim = call.layout(x), call.argument(2, "dim")
    if layout is None or not isinstance(repeats, int) or dim is None:
        raise Unsplittable("repeats by numbers that are computed, or all dimensions as one")
    if call.node.kwargs.get("output_size") is not None:
        raise Unsplittable("has its size given")
    if layout.parts and dim % len(shape(x)) == layout.dim:
        raise Unsplittable("repeats what is divided part by part")
    return NodeSplit(layout)


def split_complex_view(call: NodeCall) -> NodeSplit:
    """Split a view of pairs of numbers as complex ones, or back, as of rotary embeddings."""
    x = call.argument(0)
    layout = call.layout(x)
    assert layout is not None
    if base_name(call.node) == "view_as_complex" and layout.dim == len(shape(x)) - 1:
        raise Unsplittable("takes real and imaginary parts from a divided dimension")
    return NodeSplit(layout)


def split_getitem(call: NodeCall) -> NodeSplit:
    layouts: Any = call.layout(call.argument(0))
    index = call.argument(1)
    if not isinstance(layouts, list) or not isinstance(index, int):
        raise Unsplittable("indexes a divided value")
    return NodeSplit(layouts[index])
