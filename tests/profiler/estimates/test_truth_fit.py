"""Leaving a chip out of the fit is honest: none of its rows says anything about its prediction."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest

from stagewright.profiler.estimates.flops import Cost

SHAPES = [(1, 4096, 4096, k) for k in (512, 1024, 4096)] + [(1, 512, 1024, 4096)]


@pytest.fixture
def scripts(monkeypatch, request):
    monkeypatch.syspath_prepend(str(request.config.rootpath / "benchmarks"))
    return importlib.import_module("truth_fit"), importlib.import_module("truth_rows")


def rows_of(scripts, device: str, share: float) -> list:
    """Products in float32 that reach a share of a device's peak."""
    from stagewright.core.cluster.accelerators import get_accelerator

    rate = get_accelerator(device).peak_flops_per_s("float32") * share
    return [
        scripts[1].Row(
            "products, fp32", device, f"{shape}", flops / rate,
            ((Cost("matmul", flops, 4 * 4096 * 4096, shape),),), "float32",
        )
        for shape in SHAPES
        for flops in [2 * shape[0] * shape[1] * shape[2] * shape[3]]
    ]  # fmt: skip


def test_rows_of_a_chip_left_out_change_nothing(scripts):
    fit = scripts[0]
    others = rows_of(scripts, "V100-PCIe", 0.9) + rows_of(scripts, "A100-PCIe-40GB", 0.8)
    own = rows_of(scripts, "L4", 0.3)
    wrong = [replace(row, measured_s=3 * row.measured_s) for row in own]
    honest = fit.fit_table([*others, *own], frozenset({"L4"}))
    assert honest == fit.fit_table([*others, *wrong], frozenset({"L4"}))
    assert honest == fit.fit_table(others)
    assert "L4" not in honest.devices


def test_a_leak_would_be_seen(scripts):
    fit = scripts[0]
    others, own = rows_of(scripts, "V100-PCIe", 0.9), rows_of(scripts, "L4", 0.3)
    wrong = [replace(row, measured_s=3 * row.measured_s) for row in own]
    assert fit.fit_table([*others, *own]) != fit.fit_table([*others, *wrong])


def test_devices_of_one_chip_are_left_out_together(scripts):
    fit = scripts[0]
    others, twin = rows_of(scripts, "V100-PCIe", 0.9), rows_of(scripts, "A100-PCIe-40GB", 0.7)
    found = fit.fit_table([*others, *twin], fit.related("A100"))
    assert not any(name.startswith("A100") for name in found.devices)
