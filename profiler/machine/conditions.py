"""Conditions of a measurement: CPU threads, busy neighbours, and the GPU's clocks."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...core.errors import first_line
from ...core.profile.profile import Clocks
from .memory import ON_CUDA, free_after, is_out_of_memory


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Run torch's operations on so many threads meanwhile; `None` leaves their number."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def busy_neighbours(count: int) -> Iterator[None]:
    """Keep cores busy with ``count`` single-threaded processes doing layer-like work.

    Ranks that share a machine share its memory bandwidth and caches. A profile taken on an idle
    machine is too optimistic for them; one taken beside neighbours that work as hard is not.
    """
    command = [sys.executable, "-m", "stagewright.profiler.machine.contention_worker"]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(count)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()  # it says so when it is warm
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()


REASONS = {
    "nvmlClocksThrottleReasonSwPowerCap": "power cap",
    "nvmlClocksThrottleReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksThrottleReasonSyncBoost": "sync boost",
    "nvmlClocksThrottleReasonSwThermalSlowdown": "thermal, software",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "thermal, hardware",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "power brake",
}
"""NVML's constants for why a clock is lower than it could be; idling is none of them.

From nvml.h, "NvmlClocksThrottleReasons", as pynvml names them.
"""


NVML_CLOCK_SM = 1
"""NVML's number of the multiprocessors' clock."""


class ClockWatch:
    """Monitor of a GPU's clock and throttling; all stays unknown on the CPU or without NVML."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._clocks_mhz: list[int] = []
        self._throttled_by: set[str] = set()
        self.notes: tuple[str, ...] = ()

    def read(self) -> None:
        """Read everything, at the start and at the end."""
        if self._device.type not in ON_CUDA:
            return
        try:
            self._read_nvml(importlib.import_module("pynvml"))
        except Exception as error:  # noqa: BLE001 - a missing library, an old driver, no rights
            what = "the GPU's clock, and whether it was throttled, could not be read by NVML"
            self.notes = (f"{what}: {first_line(error)}",)

    def clocks(self) -> Clocks | None:
        """Return the clocks read, or `None` if none could be read."""
        if len(self._clocks_mhz) < 2:
            return None
        before_mhz, after_mhz = self._clocks_mhz
        throttled_by = tuple(sorted(self._throttled_by))
        return Clocks(before_mhz=before_mhz, after_mhz=after_mhz, throttled_by=throttled_by)

    def _read_nvml(self, nvml: Any) -> None:
        nvml.nvmlInit()
        # By UUID: NVML counts GPUs by bus, CUDA the fastest first.
        uuid = torch.cuda.get_device_properties(self._device).uuid
        try:
            card = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except nvml.NVMLError:  # a slice of a card (MIG) has its own UUID, and the card's clock
            part = nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
            card = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(part)
        self._clocks_mhz.append(int(nvml.nvmlDeviceGetClockInfo(card, NVML_CLOCK_SM)))
        bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(card)
        self._throttled_by.update(
            reason for constant, reason in REASONS.items() if bits & getattr(nvml, constant, 0)
        )


@contextmanager
def watched(device: torch.device) -> Iterator[ClockWatch]:
    """Watch a device over a block: clocks at both ends, and memory, freed if it runs out."""
    watch = ClockWatch(device)
    watch.read()
    try:
        yield watch
    except Exception as error:
        if is_out_of_memory(error):
            free_after(error)
        raise
    watch.read()
