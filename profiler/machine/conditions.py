"""Conditions of a measurement: CPU threads, busy neighbours, and the GPU's clocks."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from ...core.profile.profile import Clocks


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


class ClockWatch:
    """Monitor of a GPU's clock and throttling; all stays unknown on the CPU or without NVML."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._clocks_mhz: list[int] = []
        self._throttled_by: set[str] = set()

    def read(self) -> None:
        """Read everything, at the start and at the end."""
        if self._device.type == "cuda":
            # The multiprocessors' clock through torch, which asks NVML; without, nothing is known.
            with suppress(Exception):
                self._clocks_mhz.append(int(torch.cuda.clock_rate(self._device)))
            self._throttled_by.update(self._reasons())

    def clocks(self) -> Clocks | None:
        """Return the clocks read, or `None` if none could be read."""
        if len(self._clocks_mhz) < 2:
            return None
        before_mhz, after_mhz = self._clocks_mhz
        throttled_by = tuple(sorted(self._throttled_by))
        return Clocks(before_mhz=before_mhz, after_mhz=after_mhz, throttled_by=throttled_by)

    def _reasons(self) -> Iterator[str]:
        try:
            nvml: Any = importlib.import_module("pynvml")
            nvml.nvmlInit()
            handle = nvml.nvmlDeviceGetHandleByUUID(
                f"GPU-{torch.cuda.get_device_properties(self._device).uuid}"
            )
            bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        except Exception:  # noqa: BLE001 - without NVML there is nothing to report
            return
        for constant, reason in REASONS.items():
            if bits & getattr(nvml, constant, 0):
                yield reason


@contextmanager
def watched_clocks(device: torch.device) -> Iterator[ClockWatch]:
    """Watch the clocks over a block, read at its start and end."""
    watch = ClockWatch(device)
    watch.read()
    yield watch
    watch.read()
