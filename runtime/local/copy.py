"""Asynchronous copies of values between the devices of stages, and of gradients back.

A value passes three autograd nodes, and its gradient passes them backwards::

    leave     the copy stream waits until the first stage has computed the value
    cross     the copy
    arrive    the second stage waits for the copy

Meanwhile both stages compute. A node that has nothing to wait for or to copy is left out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from .streams import StageDevice

Values = tuple[Any, ...]
Stream = torch.cuda.Stream | None


def leave(values: Values, device: StageDevice) -> Values:
    """Let the copy stream wait for values that leave a stage."""
    if device.compute is None:
        return values
    return _Wait.apply(device.leaving, device.compute, *values)  # type: ignore[no-any-return, no-untyped-call]


def cross(values: Values, source: StageDevice, target: StageDevice) -> Values:
    """Copy values from one stage's device to another's."""
    if source.device == target.device:
        return values
    return _Copy.apply(source, target, *values)  # type: ignore[no-any-return, no-untyped-call]


def arrive(values: Values, device: StageDevice) -> Values:
    """Let a stage wait for values that were copied to it."""
    if device.compute is None:
        return values
    return _Wait.apply(device.compute, device.arriving, *values)  # type: ignore[no-any-return, no-untyped-call]


class _Wait(torch.autograd.Function):
    """Identity in which one stream waits for another, in backward the other way round."""

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
    """Copy on the stages' copy streams."""

    @staticmethod
    def forward(ctx: FunctionCtx, source: StageDevice, target: StageDevice, *values: Any) -> Values:
        ctx.set_materialize_grads(False)
        ctx.devices = source, target  # type: ignore[attr-defined]
        return _copy_values(values, target, source.leaving, target.arriving)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> Any:
        source, target = ctx.devices  # type: ignore[attr-defined]
        return None, None, *_copy_values(gradients, source, target.arriving, source.leaving)


def _copy_values(values: Values, target: StageDevice, sending: Stream, receiving: Stream) -> Values:
    assert target.device is not None
    # A copy to the CPU must block: nothing tells the CPU when an asynchronous one has finished.
    on_gpu = target.device.type == "cuda"
    results: list[Any] = []
    # Each stream is current on its own device: torch takes the sender's for a copy between GPUs,
    # the receiver's for one from the CPU.
    with torch.cuda.stream(sending), torch.cuda.stream(receiving):
        for value in values:
            if not isinstance(value, Tensor):
                results.append(value)
                continue
            copy = value.to(target.device, non_blocking=on_gpu)
            _record_stream(value, sending)
            _record_stream(copy, target.compute)
            results.append(copy)
    return tuple(results)


def _record_stream(tensor: Tensor, stream: Stream) -> None:
    """Keep memory allocated on another stream from reuse until this stream is done with it."""
    if stream is not None and tensor.is_cuda:
        tensor.record_stream(stream)


def _wait(waiting: Stream, awaited: Stream) -> None:
    if waiting is not None and awaited is not None:
        waiting.wait_stream(awaited)
