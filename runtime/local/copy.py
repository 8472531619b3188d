"""Tensors from one stage's device to another's, and their gradients back.

A value passes three nodes, and its gradient the same three backwards::

    leave     the copying stream waits until the first stage has computed the value
    cross     the copy
    arrive    the second stage waits for the copy

In between the stages compute on. Nothing is done where there is nothing to wait for or to copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from .streams import Place

Values = tuple[Any, ...]
Stream = torch.cuda.Stream | None


def leave(values: Values, place: Place) -> Values:
    """What a stage does with values that others will have."""
    if place.compute is None:
        return values
    return _Wait.apply(place.leaving, place.compute, *values)  # type: ignore[no-any-return, no-untyped-call]


def cross(values: Values, source: Place, target: Place) -> Values:
    """Copy values that left one stage to another."""
    if source.device == target.device:
        return values
    return _Copy.apply(source, target, *values)  # type: ignore[no-any-return, no-untyped-call]


def arrive(values: Values, place: Place) -> Values:
    """What a stage does first with values that were copied to it."""
    if place.compute is None:
        return values
    return _Wait.apply(place.compute, place.arriving, *values)  # type: ignore[no-any-return, no-untyped-call]


class _Wait(torch.autograd.Function):
    """An identity; forwards the first stream waits for the second, backwards the other way."""

    @staticmethod
    def forward(ctx: FunctionCtx, waiting: Stream, awaited: Stream, *values: Any) -> Values:
        ctx.set_materialize_grads(False)
        ctx.streams = waiting, awaited  # type: ignore[attr-defined]
        _wait(waiting, awaited)
        return tuple(v.detach() if isinstance(v, Tensor) else v for v in values)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> Any:
        waiting, awaited = ctx.streams  # type: ignore[attr-defined]
        _wait(awaited, waiting)
        return None, None, *gradients


class _Copy(torch.autograd.Function):
    """A copy on the stages' copying streams."""

    @staticmethod
    def forward(ctx: FunctionCtx, source: Place, target: Place, *values: Any) -> Values:
        ctx.set_materialize_grads(False)
        ctx.places = source, target  # type: ignore[attr-defined]
        return _copied(values, target, source.leaving, target.arriving)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> Any:
        source, target = ctx.places  # type: ignore[attr-defined]
        return None, None, *_copied(gradients, source, target.arriving, source.leaving)


def _copied(values: Values, target: Place, sending: Stream, receiving: Stream) -> Values:
    assert target.device is not None
    # From the GPU to the CPU the call has to wait: the CPU does not know when the copy is there.
    on_gpu = target.device.type == "cuda"
    results: list[Any] = []
    with torch.cuda.stream(sending), torch.cuda.stream(receiving):
        for value in values:
            if not isinstance(value, Tensor):
                results.append(value)
                continue
            copy = value.to(target.device, non_blocking=on_gpu)
            _outlive(value, sending)
            _outlive(copy, target.compute)
            results.append(copy)
    return tuple(results)


def _outlive(tensor: Tensor, stream: Stream) -> None:
    """Keep memory that was allocated for another stream until this one is done with it."""
    if stream is not None and tensor.is_cuda:
        tensor.record_stream(stream)


def _wait(waiting: Stream, awaited: Stream) -> None:
    if waiting is not None and awaited is not None:
        waiting.wait_stream(awaited)
