"""A device's table as `stagewright calibrate` keeps it; imports no torch."""

from __future__ import annotations

import os
from datetime import date
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from ...core.cluster.accelerators import Precision
from ...core.document import Document, LongTuple, Name, Record


class TimedOperation(Record):
    """One operation of the calibration: how long it took, and what the fitted table says.

    ``kind`` is its class.
    """

    name: Name
    kind: Name
    measured_s: float = Field(gt=0)
    fitted_s: float = Field(ge=0)


class CalibrationTable(Document):
    """Efficiencies of one device at one precision, fitted to operations timed on it.

    Attributes:
        device: Name in the catalogue.
        device_name: As its driver reports it.
        num_threads: Of a CPU.
        measured_on: Date of the measurement.
        efficiency: By class of operation; see `DeviceRates`.
        operations: Every operation it was fitted to.
    """

    SCHEMA: ClassVar[str] = "stagewright.calibration/1"

    schema_version: Literal["stagewright.calibration/1"] = "stagewright.calibration/1"
    device: Name
    device_name: Name
    precision: Precision
    num_threads: int = Field(1, ge=1)
    torch_version: Name
    measured_on: date
    efficiency: dict[Name, float]
    traffic: float = Field(gt=0)
    overhead_s: float = Field(ge=0)
    operations: LongTuple[TimedOperation]

    @property
    def median_error(self) -> float:
        """Return the middle relative error of the fit over its own operations."""
        errors = sorted(abs(one.fitted_s / one.measured_s - 1) for one in self.operations)
        return errors[len(errors) // 2]

    @property
    def bands(self) -> dict[str, float]:
        """Return the largest relative error of the fit by class of operation."""
        found: dict[str, float] = {}
        for one in self.operations:
            error = abs(one.fitted_s / one.measured_s - 1)
            found[one.kind] = max(error, found.get(one.kind, 0.0))
        return found


def calibration_path(device: str, precision: Precision, num_threads: int) -> Path:
    """Return where a device's table is kept."""
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    threads = f"-{num_threads}-threads" if device == "CPU" else ""
    return Path(base) / "stagewright" / "calibration" / f"{device}-{precision}{threads}.json"


def read_kept_table(device: str, precision: Precision, num_threads: int) -> CalibrationTable | None:
    """Return the table kept for a device, if there is one."""
    path = calibration_path(device, precision, num_threads)
    if not path.is_file():
        return None
    found: CalibrationTable = CalibrationTable.read(path)
    return found
