"""Device and CUDA streams of a stage, and placement of stages on devices."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ...capture.capture import default_device
from ...capture.program.segment import Segment
from ...core.errors import InvalidInput
from ...core.plan.plan import Plan
from ..local.streams import full_device
from ..partition.cut import CutModel
from .microbatch import Values


class InferenceDevice:
    """Device of a stage and, on a GPU, its streams.

    Copies to the device use other streams than the computation, so that a stage computes one
    micro-batch while the next one arrives.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = full_device(device)
        self._on_gpu = self.device.type == "cuda"
        self._work = torch.cuda.Stream(self.device) if self._on_gpu else None
        self._copies: dict[torch.device, torch.cuda.Stream] = {}

    def use_stream(self) -> AbstractContextManager[None]:
        """Queue CUDA work on the stage's stream."""
        return torch.cuda.stream(self._work)

    def move_here(self, values: Values, ready: torch.cuda.Event | None) -> Values:
        """Move values that are computed once ``ready`` here; call it inside `use_stream`."""
        if ready is not None and not self._on_gpu:
            ready.synchronize()
        return tuple(self._move(v, ready) if isinstance(v, Tensor) else v for v in values)

    def record_event(self) -> torch.cuda.Event | None:
        """Return an event after everything queued so far; `None` without streams."""
        return None if self._work is None else self._work.record_event()

    def _move(self, tensor: Tensor, ready: torch.cuda.Event | None) -> Tensor:
        if self._work is None:
            return tensor.to(self.device)
        if tensor.device == self.device:
            _wait(self._work, ready)
            # Or the allocator could reuse its memory once the sender's stream is done with it.
            tensor.record_stream(self._work)
            return tensor
        receiving = self._copy_stream(self.device)
        sending = self._copy_stream(tensor.device) if tensor.is_cuda else None
        _wait(sending or receiving, ready)
        # torch copies between GPUs on the sender's stream, from the CPU on the receiver's.
        with torch.cuda.stream(sending) if sending else nullcontext(), torch.cuda.stream(receiving):
            copy = tensor.to(self.device, non_blocking=True)
        if sending is not None:
            tensor.record_stream(sending)
        self._work.wait_stream(receiving)
        copy.record_stream(self._work)
        return copy

    def _copy_stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._copies:
            self._copies[device] = torch.cuda.Stream(device)
        return self._copies[device]


def record_ready(values: Values) -> torch.cuda.Event | None:
    """Return an event after the computation of values that the caller made on its current stream.

    The inputs of a request are on one device, or already computed.
    """
    device = next((v.device for v in values if isinstance(v, Tensor) and v.is_cuda), None)
    return None if device is None else torch.cuda.current_stream(device).record_event()


def current_streams() -> dict[torch.device, torch.cuda.Stream]:
    """Return the caller's current stream on every GPU."""
    if not torch.cuda.is_initialized():
        return {}
    return {
        torch.device("cuda", index): torch.cuda.current_stream(index)
        for index in range(torch.cuda.device_count())
    }


def record_use(value: Any, streams: dict[torch.device, torch.cuda.Stream]) -> None:
    """Keep a result's memory from reuse while the caller's streams still read it."""
    if isinstance(value, Tensor) and value.is_cuda:
        value.record_stream(streams.get(value.device, torch.cuda.default_stream(value.device)))


def _wait(stream: torch.cuda.Stream, ready: torch.cuda.Event | None) -> None:
    if ready is not None:
        stream.wait_event(ready)


def assign_devices(
    plan: Plan, devices: Sequence[torch.device | str] | None, model: nn.Module
) -> list[list[InferenceDevice]]:
    """Return the device of each replica of each stage.

    On a single device replicas gain nothing, and each stage runs once.

    Given are one device, or one per replica, stage by stage; `None` for the model's own.
    """
    replicas = [stage.replicas for stage in plan.stages]
    given = [default_device(model)] if devices is None else list(devices)
    if len(given) == 1:
        return [[InferenceDevice(given[0])] for _ in replicas]
    if len(given) != sum(replicas):
        counts = "-".join(map(str, replicas))
        raise InvalidInput(
            f"expected one device or {sum(replicas)}, one per replica of the plan's stages "
            f"({counts}), got {len(given)}"
        )
    rest = iter(given)
    return [[InferenceDevice(next(rest)) for _ in range(count)] for count in replicas]


def place_stages(
    cut_model: CutModel, devices: Sequence[Sequence[InferenceDevice]], model: nn.Module
) -> list[list[Segment]]:
    """Move each stage to its devices, in evaluation mode; return the replicas by stage.

    The model's own modules move to the device of their stage. Further replicas are copies, and
    so is a stage that shares a weight with an earlier stage on another device: a module can be
    on one device only.
    """
    homes: dict[int, torch.device] = {}  # device of each tensor, by identity
    placed = []
    for stage, stage_devices in zip(cut_model.stages, devices, strict=True):
        stage.train(False)
        held = [id(tensor) for tensor in (*stage.parameters(), *stage.buffers())]
        own = all(
            homes.setdefault(key, stage_devices[0].device) == stage_devices[0].device
            for key in held
        )
        replicas = [stage] if own else [copy.deepcopy(stage)]
        replicas += [copy.deepcopy(stage) for _ in stage_devices[1:]]
        for replica, home in zip(replicas, stage_devices, strict=True):
            replica.to(home.device)
        if own:
            stage.export_buffers(model)
        placed.append(replicas)
    model.eval()
    return placed
