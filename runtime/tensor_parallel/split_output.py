"""Outputs of which each rank holds a part, as a loss reads them.

A loss gets a tensor of the whole shape. Cross-entropy over divided classes is computed on the parts
(Shoeybi et al. 2019, "Megatron-LM", section 3), so that logits are never whole; reshaping of the
other dimensions stays with the parts, and any other operation gathers them first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from ...capture.splitting.layout import Shard
from .exchange import ShardGroup


class NeedsWholeOutput(Exception):
    """A loss reads an output by other means than torch's functions."""


class SplitOutput(Tensor):
    """A tensor of which each rank of a group holds a part along one dimension."""

    part: Tensor
    shard: Shard
    group: ShardGroup

    @staticmethod
    def __new__(
        cls: type[SplitOutput], part: Tensor, layout: Shard, group: ShardGroup
    ) -> SplitOutput:
        """Make the whole tensor of this rank's part."""
        shape = list(part.shape)
        shape[layout.dim] *= group.degree
        made = Tensor._make_wrapper_subclass(
            cls, shape, dtype=part.dtype, device=part.device, requires_grad=part.requires_grad
        )
        made.part, made.shard, made.group = part, layout, group
        return made

    def whole(self) -> Tensor:
        """Gather the parts; every rank of the group has to."""
        return self.group.exchange().gather(self.shard)(self.part)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SplitOutput({tuple(self.shape)}, {self.shard})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func in _DESCRIPTIONS:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        found = None
        if isinstance(first, SplitOutput) and _changes_first(func, kwargs):
            raise NeedsWholeOutput(str(func))
        if isinstance(first, SplitOutput) and func is F.cross_entropy:
            found = _cross_entropy(*args, **kwargs)
        elif isinstance(first, SplitOutput):
            found = _map_rows(first, func, args[1:], kwargs)
        if found is not None:
            return found
        gathered = {
            id(each): each.whole()
            for each in pytree.tree_leaves((args, kwargs))
            if isinstance(each, SplitOutput)
        }
        args, kwargs = pytree.tree_map(lambda each: gathered.get(id(each), each), (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise NeedsWholeOutput(str(func))


class _Wrap(torch.autograd.Function):
    """Makes gradients of the whole, as functions of autograd return them, those of the part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, layout: Shard, group: ShardGroup) -> SplitOutput:
        ctx.layout, ctx.group = layout, group
        return SplitOutput(part, layout, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.take(gradient, ctx.layout), None, None


def wrap(part: Tensor, layout: Shard, group: ShardGroup) -> SplitOutput:
    """Return the whole tensor of this rank's part, through which gradients flow to the part."""
    made: SplitOutput = _Wrap.apply(part, layout, group)  # type: ignore[no-untyped-call]
    made.part, made.shard, made.group = part, layout, group
    return made


class OutputParts:
    """Outputs of a model of which ranks hold parts.

    Args:
        layouts: Layout of each output; `None` if it is whole.
        group: The ranks that hold the parts.
    """

    def __init__(self, layouts: Sequence[Shard | None], group: ShardGroup) -> None:
        self._layouts, self._group = layouts, group
        self._are_joined = False

    def compute(self, loss: Callable[[list[Any]], Tensor], outputs: Sequence[Any]) -> Tensor:
        """Return a loss of outputs of the whole shape."""
        if not self._are_joined:
            try:
                return loss(self._map(wrap, outputs))
            except NeedsWholeOutput:
                self._are_joined = True
        return loss(self._map(lambda *each: wrap(*each).whole(), outputs))

    @torch.no_grad()
    def join(self, outputs: Sequence[Any]) -> list[Any]:
        """Return whole outputs."""
        return self._map(lambda value, layout, group: group.join(value, layout), outputs)

    def _map(
        self, function: Callable[[Tensor, Shard, ShardGroup], Tensor], outputs: Sequence[Any]
    ) -> list[Any]:
        return [
            value if layout is None else function(value, layout, self._group)
            for value, layout in zip(outputs, self._layouts, strict=True)
        ]


_DESCRIPTIONS = {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.is_floating_point, Tensor.__len__,
    Tensor.ndimension, Tensor.nelement,
    *(
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_leaf")
        if hasattr(getattr(Tensor, name), "__get__")
    ),
}  # fmt: skip
"""Functions that read no values."""

_CHANGES = {
    "register_hook", "retain_grad", "__setitem__", "__set__", "__iadd__", "__isub__", "__imul__",
    "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__",
    "__ilshift__", "__irshift__",
}  # fmt: skip
"""Functions that change a tensor, besides those whose name says so."""

_SHAPES = {Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten}

_CONVERSIONS = {
    Tensor.contiguous, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.to,
}  # fmt: skip


def _changes_first(func: Callable[..., Any], kwargs: Any) -> bool:
    """Return True if a function changes its first argument, which a gathered copy would hide."""
    name = getattr(func, "__name__", "")
    is_method = name.endswith("_") and not name.endswith("__")
    return is_method or name in _CHANGES or bool(kwargs.get("inplace"))


def _map_rows(value: SplitOutput, func: Callable[..., Any], rest: Any, kwargs: Any) -> Any:
    """Return a function's result in parts; `None` if it may mix elements of the last dimension."""
    if value.shard != Shard(value.dim() - 1):
        return None
    part, size = value.part, value.shape[-1]
    if func in _SHAPES and not any(isinstance(each, torch.dtype) for each in rest):
        shape = func(torch.empty(value.shape, device="meta"), *rest, **kwargs).shape
        if not shape or shape[-1] != size:
            return None
        made = part.reshape(*shape[:-1], part.shape[-1])
    elif func in _CONVERSIONS or (func is Tensor.__getitem__ and _keeps_last(rest[0], value.dim())):
        made = func(part, *rest, **kwargs)
    else:
        return None
    return wrap(made, Shard(made.dim() - 1), value.group)


def _keeps_last(index: Any, dims: int) -> bool:
    """Return True if an index takes the whole last dimension, and leaves it the last."""
    index = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(each, int | slice | None | EllipsisType) for each in index):
        return False
    taken = sum(isinstance(each, int | slice) for each in index)
    if taken < dims and Ellipsis not in index:
        return True
    return index[-1] == slice(None) or (index[-1] is Ellipsis and taken < dims)


def _cross_entropy(
    logits: SplitOutput,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    """Return `torch.nn.functional.cross_entropy` of parts; `None` for what needs the whole."""
    by_class = logits.shard == Shard(1 if logits.dim() > 1 else 0)
    if not by_class or weight is not None or target.is_floating_point():
        return None
    if size_average is not None or reduce is not None or type(target) is SplitOutput:
        return None
    if reduction not in ("none", "mean", "sum"):  # torch's own error
        return None
    losses: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits.part, target, logits.group, ignore_index, label_smoothing
    )
    if reduction != "none":
        losses = losses.sum()
    if reduction == "mean":
        losses = losses / (target != ignore_index).sum()
    # As torch's, which autocast gives float32.
    return losses if torch.is_autocast_enabled(logits.device.type) else losses.to(logits.dtype)


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy by position, of classes (dimension 1, or the only one) in parts."""

    @staticmethod
    def forward(
        ctx: Any,
        part: Tensor,
        target: Tensor,
        group: ShardGroup,
        ignored: int,
        smoothing: float,
    ) -> Tensor:
        dim = min(1, part.dim() - 1)
        x = part if part.dtype == torch.float64 else part.float()
        first, here = group.shard * part.shape[dim], part.shape[dim]
        classes, is_used = here * group.degree, target != ignored
        is_known = (target >= 0) & (target < classes)
        torch._assert_async((is_known | ~is_used).all(), f"a target is none of {classes} classes")
        local = (target - first).unsqueeze(dim)
        is_here = (local >= 0) & (local < here)
        local = local.where(is_here, 0)
        largest = group.maximum(x.amax(dim, keepdim=True))
        sums = group.sum(
            torch.cat(
                [
                    (x - largest).exp().sum(dim, keepdim=True),
                    x.gather(dim, local).where(is_here, 0),
                    x.sum(dim, keepdim=True),
                ],
                dim,
            )
        )
        of_exp, of_target, of_all = sums.split(1, dim)
        log_sum = of_exp.log() + largest
        loss: Tensor = log_sum - (1 - smoothing) * of_target
        if smoothing:  # else a masked class, of a logit of -inf, would make it NaN
            loss = loss - smoothing * of_all / classes
        is_used = is_used.unsqueeze(dim)
        ctx.save_for_backward(part, log_sum, local, is_here, is_used)
        ctx.dim, ctx.smoothing, ctx.classes = dim, smoothing, classes
        return loss.where(is_used, 0).squeeze(dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        part, log_sum, local, is_here, is_used = ctx.saved_tensors
        x = part if part.dtype == torch.float64 else part.float()
        found = (x - log_sum).exp_() - ctx.smoothing / ctx.classes
        found.scatter_add_(ctx.dim, local, -(1 - ctx.smoothing) * is_here.to(found.dtype))
        found *= gradient.unsqueeze(ctx.dim).where(is_used, 0)
        return found.to(part.dtype), None, None, None, None
