"""Find the device at hand in the catalogue and calibrate it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...core.cluster.accelerators import Precision, find_by_driver_name
from ...core.errors import InvalidInput
from .calibrate_device import calibrate_device
from .calibration_table import CalibrationTable
from .estimate import target


def calibrate_here(
    device: str,
    precision: Precision | None,
    num_threads: int | None,
    on_progress: Callable[[str], None],
) -> CalibrationTable:
    """Return the table of this machine's device: ``cpu``, ``cuda``, or the better by default."""
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in ("cpu", "cuda"):
        raise InvalidInput(f"unknown device {device!r}: choose cpu or cuda", field="/device")
    if kind == "cpu":
        wanted = target("CPU", precision, num_threads)
        before = torch.get_num_threads()
        torch.set_num_threads(wanted.num_threads)
        try:
            return calibrate_device(
                wanted, torch.device("cpu"), "this machine's CPU", on_progress=on_progress
            )
        finally:
            torch.set_num_threads(before)
    if not torch.cuda.is_available():
        raise InvalidInput("no CUDA device is visible; use --device cpu", field="/device")
    name = torch.cuda.get_device_name()
    entry = find_by_driver_name(name)
    if entry is None:
        raise InvalidInput(
            f"{name} is not in the catalogue, so that its peak rates are not known; profile models "
            "on it instead (stagewright profile)",
            field="/device",
        )
    return calibrate_device(
        target(entry, precision), torch.device("cuda"), name, on_progress=on_progress
    )
