"""Where a stage works: its device and, on a GPU, the streams its work is queued on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Place:
    """Where one stage works.

    Copies have streams of their own, so that a stage computes on while what it made is sent.

    Attributes:
        device: `None` leaves everything where it is.
        compute: The stream it computes on; `None` for all three where there are no streams.
        arriving: The stream on which what it is given is copied to it, and gradients from it.
        leaving: The stream on which what it made is copied away, and gradients to it.
    """

    device: torch.device | None
    compute: torch.cuda.Stream | None = None
    arriving: torch.cuda.Stream | None = None
    leaving: torch.cuda.Stream | None = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Queue work on the stage's own stream."""
        with torch.cuda.stream(self.compute):
            yield


class CopyStreams:
    """The streams for copies of all stages, made once: memory is cached for every stream apart.

    A copy or a pickle of it is empty, so that what holds it can be copied.
    """

    def __init__(self) -> None:
        self._pairs: dict[int, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}

    def __reduce__(self) -> tuple[type[CopyStreams], tuple[()]]:
        return CopyStreams, ()

    def places(self, devices: Sequence[torch.device | None]) -> list[Place]:
        """Each stage's place, to compute on the caller's current streams."""
        return [self._place(stage, device) for stage, device in enumerate(devices)]

    def _place(self, stage: int, device: torch.device | None) -> Place:
        if device is None:
            return Place(None)
        device = full_device(device)
        if device.type != "cuda":
            return Place(device)
        if stage not in self._pairs:
            self._pairs[stage] = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return Place(device, torch.cuda.current_stream(device), *self._pairs[stage])


def full_device(device: torch.device | str | int) -> torch.device:
    """A device by its one name: ``cuda`` is the current one, ``cpu:0`` is ``cpu``."""
    named = torch.device(device)
    if named.type == "cpu":
        return torch.device("cpu")
    if named.type == "cuda" and named.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return named
