"""Device of a local stage and, on a GPU, its compute and copy streams."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StageDevice:
    """Device and streams of one stage.

    Copies use separate streams, so that a stage computes while its outputs are sent.

    Attributes:
        device: Device of the stage; `None` leaves values where they are.
        compute: Compute stream; all streams are `None` on a CPU.
        arriving: Stream that copies inputs to the stage, and their gradients away.
        leaving: Stream that copies outputs away, and their gradients to the stage.
    """

    device: torch.device | None
    compute: torch.cuda.Stream | None = None
    arriving: torch.cuda.Stream | None = None
    leaving: torch.cuda.Stream | None = None

    def activate(self) -> AbstractContextManager[None]:
        """Queue CUDA work on the stage's compute stream."""
        return torch.cuda.stream(self.compute)


class CopyStreams:
    """Copy streams of all stages, created once, since torch caches memory separately per stream.

    A copy or pickle of it is empty, so that objects that hold it can be copied.
    """

    def __init__(self) -> None:
        self._pairs: dict[int, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}

    def __reduce__(self) -> tuple[type[CopyStreams], tuple[()]]:
        return CopyStreams, ()

    def stage_devices(self, devices: Sequence[torch.device | None]) -> list[StageDevice]:
        """Return each stage's device; stages compute on the caller's current streams."""
        return [self._stage_device(stage, device) for stage, device in enumerate(devices)]

    def _stage_device(self, stage: int, device: torch.device | None) -> StageDevice:
        if device is None:
            return StageDevice(None)
        device = full_device(device)
        if device.type != "cuda":
            return StageDevice(device)
        if stage not in self._pairs:
            self._pairs[stage] = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return StageDevice(device, torch.cuda.current_stream(device), *self._pairs[stage])


def full_device(device: torch.device | str | int) -> torch.device:
    """Return a device under its unique name: ``cuda`` is the current one, ``cpu:0`` is ``cpu``."""
    named = torch.device(device)
    if named.type == "cpu":
        return torch.device("cpu")
    if named.type == "cuda" and named.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return named
