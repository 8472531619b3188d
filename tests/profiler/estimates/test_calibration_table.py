"""A table that `stagewright calibrate` keeps decides estimates of its device, and of no other."""

from __future__ import annotations

from datetime import date

import pytest
import torch

from stagewright.core.errors import InvalidInput
from stagewright.core.models.families import MLPSpec
from stagewright.core.profile.totals import total_time_s
from stagewright.profiler.estimates import calibrate_device
from stagewright.profiler.estimates.calibration_table import (
    CalibrationTable,
    TimedOperation,
    calibration_path,
    read_kept_table,
)
from stagewright.profiler.estimates.estimate import estimate_spec, target
from stagewright.profiler.estimates.flops import OPERATION_CLASSES

MLP = MLPSpec(family="mlp")


def table_of(share: float, **changes) -> CalibrationTable:
    fields = {
        "device": "CPU",
        "device_name": "this test's CPU",
        "precision": "float32",
        "torch_version": "2",
        "measured_on": date(2026, 11, 25),
        "efficiency": dict.fromkeys(OPERATION_CLASSES, share),
        "traffic": share,
        "overhead_s": 0.0,
        "operations": (TimedOperation(name="one", kind="matmul", measured_s=1, fitted_s=1),),
    }
    return CalibrationTable(**{**fields, **changes})


def test_a_table_decides_the_times_and_is_named():
    slow, fast = (
        estimate_spec(MLP, device="CPU", num_threads=1, table=table_of(share))
        for share in (0.1, 0.2)
    )
    assert total_time_s(slow) == pytest.approx(2 * total_time_s(fast))
    assert slow.provenance.rests_on == (
        "all operations: table (calibrated on this test's CPU, 2026-11-25)",
    )


@pytest.mark.parametrize("changes", [{"precision": "tf32"}, {"num_threads": 4}, {"device": "L4"}])
def test_a_table_of_something_else_is_refused(changes):
    with pytest.raises(InvalidInput, match="run stagewright calibrate"):
        estimate_spec(MLP, device="CPU", num_threads=1, table=table_of(0.1, **changes))


def test_a_kept_table_is_found_again(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert read_kept_table("CPU", "float32", 1) is None
    path = calibration_path("CPU", "float32", 1)
    path.parent.mkdir(parents=True)
    path.write_text(table_of(0.3).to_json())
    assert read_kept_table("CPU", "float32", 1) == table_of(0.3)
    assert read_kept_table("CPU", "float32", 2) is None


def test_a_tables_own_errors_make_the_bands_of_layers():
    """Products fitted within 10 %, elementwise operations 40 % off: layers of these are wider."""
    timed = (("matmul", 1.1), ("matmul", 1.0), ("elementwise", 0.6))
    operations = tuple(
        TimedOperation(name=f"{index}", kind=kind, measured_s=1, fitted_s=fitted)
        for index, (kind, fitted) in enumerate(timed)
    )
    table = table_of(0.1, operations=operations)
    assert table.bands == pytest.approx({"matmul": 0.1, "elementwise": 0.4})
    found = estimate_spec(MLP, device="CPU", num_threads=1, table=table).layers
    bands = {entry.layer.module_type: entry.error_band for entry in found}
    assert bands["ReLU"] > 1.5 * bands["Linear"]


def test_the_fit_follows_what_was_timed(monkeypatch):
    """Operations that all take 10 ms, far longer than usual, make a model as slow."""
    wanted = target("CPU", "float32", 1)
    monkeypatch.setattr(calibrate_device, "time_operation", lambda run, device: 1e-2)
    found = calibrate_device.calibrate_device(wanted, torch.device("cpu"), "a slow core")
    assert len(found.operations) > 20
    assert {one.measured_s for one in found.operations} == {1e-2}
    assert {one.kind for one in found.operations if "product" in one.name} == {"matmul"}
    assert set(found.bands) == set(OPERATION_CLASSES)
    slower = estimate_spec(MLP, device="CPU", num_threads=1, table=found)
    assert total_time_s(slower) > 3 * total_time_s(estimate_spec(MLP, device="CPU", num_threads=1))
