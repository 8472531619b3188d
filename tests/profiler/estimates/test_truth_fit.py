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


def all_reduces(scripts, device: str, factor: float = 1.0) -> list:
    return [
        scripts[1].CollectiveRow(device, "all_reduce", count, size, factor * (1e-5 + size / 1e11))
        for count in (2, 8)
        for size in (1024, 2**20, 2**28)
    ]


@pytest.mark.parametrize("device", ["A100-80GB", "L40S", "MI250"])
def test_all_reduces_of_a_device_left_out_change_nothing(scripts, device):
    links = importlib.import_module("truth_links")
    others = [
        row
        for name in {"A100-80GB", "L40S", "MI250"} - {device}
        for row in all_reduces(scripts, name)
    ]
    honest, wrong = (
        links.predict_left_out([*others, *all_reduces(scripts, device, factor)], device)
        for factor in (1.0, 10.0)
    )
    assert honest == wrong
    small_s, large_s = (honest.all_reduce_time_s(1024, count) for count in (2, 8))
    assert small_s < large_s < 1e-4
    assert honest.basis == "guess"


def test_switches_that_sum_are_faster_than_rings_from_three_devices_on(scripts):
    links = importlib.import_module("truth_links")
    rows = [row for name in ("A100-80GB", "L40S", "MI250") for row in all_reduces(scripts, name)]
    table = links.fit_links(rows)
    ring, switch = (table[name].bandwidth for name in ("NVLink 3", "NVLink 4"))
    assert switch[2] == pytest.approx(1.5 * ring[2])
    assert switch[8] > 1.5 * ring[8]


def test_the_floor_of_a_smooth_device_is_small_and_that_of_a_noisy_one_its_noise(scripts):
    floor = importlib.import_module("truth_floor")
    rows = [
        scripts[1].Row(
            "products, fp32", "L4", f"{m} x {n} x {k}", 2 * m * n * k / 1e13,
            ((Cost("matmul", 2 * m * n * k, 1, (1, m, n, k)),),), "float32", facts={"m": m},
        )
        for m in (4096, 8192, 16384)
        for n in (512, 1024, 2048, 4096)
        for k in (512, 1024, 2048, 4096)
    ]  # fmt: skip
    assert floor.find_floors(rows)["products, fp32"] < 1e-6
    noisy = [
        replace(row, measured_s=row.measured_s * (1.2 if index % 2 else 0.8))
        for index, row in enumerate(rows)
    ]
    assert floor.find_floors(noisy)["products, fp32"] > 0.1
