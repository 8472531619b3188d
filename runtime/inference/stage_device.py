"""Where one stage works, and how values come to it from wherever they were made."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
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


class Seat:
    """A device and, on a GPU, streams of its own.

    Copies to the device have other streams than the work there, so that a stage works on one
    piece while the next arrives.

    Args:
        device: Of the stage.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = full_device(device)
        self._on_gpu = self.device.type == "cuda"
        self._work = torch.cuda.Stream(self.device) if self._on_gpu else None
        self._copies: dict[torch.device, torch.cuda.Stream] = {}

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Queue work on the stage's own stream."""
        with torch.cuda.stream(self._work):
            yield

    def bring(self, values: Values, ready: torch.cuda.Event | None) -> Values:
        """Values on this device, which its stream waits for; to be called inside `taken`.

        Args:
            values: Tensors on any device, and other values.
            ready: When they are computed.
        """
        if ready is not None and not self._on_gpu:
            ready.synchronize()
        return tuple(self._brought(v, ready) if isinstance(v, Tensor) else v for v in values)

    def done(self) -> torch.cuda.Event | None:
        """When what was queued so far is computed; `None` if it is."""
        return None if self._work is None else self._work.record_event()

    def _brought(self, tensor: Tensor, ready: torch.cuda.Event | None) -> Tensor:
        if self._work is None:
            return tensor.to(self.device)
        if tensor.device == self.device:
            _wait(self._work, ready)
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


def submitted(values: Values) -> torch.cuda.Event | None:
    """When values that the caller made on its current stream are computed.

    Inputs of one request are on one device, or computed already.
    """
    device = next((v.device for v in values if isinstance(v, Tensor) and v.is_cuda), None)
    return None if device is None else torch.cuda.current_stream(device).record_event()


def current_streams() -> dict[torch.device, torch.cuda.Stream]:
    """The caller's stream on every GPU in use."""
    if not torch.cuda.is_initialized():
        return {}
    return {
        torch.device("cuda", index): torch.cuda.current_stream(index)
        for index in range(torch.cuda.device_count())
    }


def keep_for(value: Any, streams: dict[torch.device, torch.cuda.Stream]) -> None:
    """Let no stage reuse a result's memory while the caller's streams are at work on it."""
    if isinstance(value, Tensor) and value.is_cuda:
        value.record_stream(streams.get(value.device, torch.cuda.default_stream(value.device)))


def _wait(stream: torch.cuda.Stream, ready: torch.cuda.Event | None) -> None:
    if ready is not None:
        stream.wait_event(ready)


def seats_for(
    plan: Plan, devices: Sequence[torch.device | str] | None, model: nn.Module
) -> list[list[Seat]]:
    """Where each replica of each stage works.

    On one device replicas have nothing to gain, and each stage has one seat.

    Args:
        plan: How many replicas each stage has.
        devices: One, or one for every device of the plan, stage by stage; `None` for the model's.
        model: To see where it is.

    Raises:
        InvalidInput: Another number of devices.
    """
    replicas = [stage.replicas for stage in plan.stages]
    given = [default_device(model)] if devices is None else list(devices)
    if len(given) == 1:
        return [[Seat(given[0])] for _ in replicas]
    if len(given) != sum(replicas):
        counts = "-".join(map(str, replicas))
        raise InvalidInput(
            f"give one device, or {sum(replicas)}: one for every replica of the plan's stages "
            f"({counts}); got {len(given)}"
        )
    rest = iter(given)
    return [[Seat(next(rest)) for _ in range(count)] for count in replicas]


def placed(
    pieces: CutModel, seats: Sequence[Sequence[Seat]], model: nn.Module
) -> list[list[Segment]]:
    """The stages of each seat, in evaluation mode.

    The model's own modules go where their stage is. A further replica, and a stage that holds a
    weight of an earlier one on another device, have copies: threads that work at the same time
    cannot move one module to and fro.

    Raises:
        PlanMismatch: Capture froze an operation in training mode.
    """
    homes: dict[int, torch.device] = {}
    found = []
    for stage, places in zip(pieces.stages, seats, strict=True):
        stage.train(False)
        held = [id(tensor) for tensor in (*stage.parameters(), *stage.buffers())]
        own = all(homes.setdefault(key, places[0].device) == places[0].device for key in held)
        here = [stage] if own else [copy.deepcopy(stage)]
        here += [copy.deepcopy(stage) for _ in places[1:]]
        for each, seat in zip(here, places, strict=True):
            each.to(seat.device)
        if own:
            stage.export_buffers(model)
        found.append(here)
    model.eval()
    return found
