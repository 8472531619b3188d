"""Kernels by shape: waves of tiles, cache, power; what the table lacks follows its rules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from stagewright.core.cluster.accelerators import CATALOGUE, get_accelerator
from stagewright.profiler.estimates.device_table import list_same_chip, load_gpu_table
from stagewright.profiler.estimates.flops import Cost
from stagewright.profiler.estimates.kernel_model import (
    ChipFigures,
    KernelConstants,
    attention_seconds,
    product_seconds,
    traffic_seconds,
)
from stagewright.profiler.estimates.roofline import CostTable, default_rates

CHIP = ChipFigures(
    rate_flops_per_s=1e14,
    bandwidth_bytes_per_s=1e15,
    cache_bytes=4e7,
    num_units=100,
    clock_hz=1e12 / 1024,
)
CONSTANTS = KernelConstants(
    k_start=100, half_tile=0.9, small_tile=0.8, cache_unit_rate=3e13, overlap=8, start_s=1e-6
)


def seconds_of(*shape: int, chip: ChipFigures = CHIP) -> float:
    batch, m, n, k = shape
    flops = np.array([2.0 * batch * m * n * k])
    return float(product_seconds(np.array([shape], float), flops, np.ones(1), chip, CONSTANTS)[0])


def test_one_tile_more_than_the_multiprocessors_takes_another_wave():
    """A library cannot do better than the best of its tiles, so no time falls with the size."""
    full = seconds_of(1, 256 * 10, 128 * 10, 8192)
    assert seconds_of(1, 256 * 10, 128 * 10 - 1, 8192) == full
    assert seconds_of(1, 256 * 10, 128 * 10 + 1, 8192) > 1.15 * full


def test_large_products_reach_the_sustained_rate_and_small_ones_do_not():
    flops = 2 * 25600 * 12800 * 8192
    assert seconds_of(1, 25600, 12800, 8192) == pytest.approx(flops / 1e14, rel=0.03)
    assert seconds_of(1, 64, 64, 8192) > 5 * 2 * 64 * 64 * 8192 / 1e14


def test_a_tall_sum_is_cut_along_k():
    """One tile would leave 99 of 100 multiprocessors idle for the whole of k."""
    alone = 2 * 256 * 128 * (65536 + 100) / (1e14 / 100)
    assert seconds_of(1, 256, 128, 65536) < alone / 4


def test_a_fast_multiprocessor_loses_more_steps_to_a_tiles_start():
    """The start is a latency: twice the rate is worth less than half the time for short sums."""
    fast = replace(CHIP, rate_flops_per_s=2e14)
    shape = (1, 25600, 12800, 256)
    assert seconds_of(*shape, chip=fast) > 0.6 * seconds_of(*shape)
    assert seconds_of(1, 25600, 12800, 65536, chip=fast) < 0.51 * seconds_of(1, 25600, 12800, 65536)


def test_before_volta_many_columns_take_longer_and_many_rows_do_not():
    """On a P100 a product of 50,000 columns runs at a third of the rate of its transpose."""
    walking = replace(CHIP, walks_columns=True)
    constants = replace(CONSTANTS, column_exponent=0.4)
    times = {}
    for chip in (CHIP, walking):
        for m, n in ((16384, 2048), (2048, 65536)):
            flops = np.array([2.0 * m * n * 4096])
            shape = np.array([[1, m, n, 4096]], float)
            times[chip.walks_columns, n] = product_seconds(
                shape, flops, np.ones(1), chip, constants
            )[0]
    assert times[True, 2048] == times[False, 2048]
    assert times[True, 65536] > 2 * times[False, 65536]
    assert get_accelerator("P100").walks_columns
    assert not get_accelerator("V100").walks_columns


def test_what_fits_in_the_cache_moves_faster():
    small, large = traffic_seconds(np.array([1e7, 1e8]), CHIP, cache_unit_rate=3e13)
    assert small == pytest.approx(1e7 / 3e15)
    assert large == pytest.approx(1e8 / 1e15)


def test_attention_on_few_heads_leaves_multiprocessors_idle():
    flops, moved = np.array([1e12]), np.ones(1)
    few, many = (
        attention_seconds(np.array([[heads, 1280, 1280, 64.0]]), flops, moved, CHIP, CONSTANTS)[0]
        for heads in (1, 100)
    )
    assert few == pytest.approx(10 * many, rel=1e-6)


def test_an_estimate_counts_the_waves_of_its_products():
    """The same FLOPs and bytes in one thin product take longer than in a square one."""
    rates = default_rates(get_accelerator("A100"), "bfloat16")
    square, thin = (
        Cost("matmul", 2 * 4096**3, 10**8, shape)
        for shape in ((1, 4096, 4096, 4096), (1, 16, 4096, 2**20))
    )
    times = CostTable([[square], [thin]]).seconds(rates)
    assert times[1] > 1.5 * times[0]


def test_the_host_bounds_many_small_kernels_and_a_graph_does_not():
    costs = [[Cost("elementwise", 0, 1000)] * 100]
    eager, graph = (
        CostTable(costs).seconds(default_rates(get_accelerator("H100"), "bfloat16", launch=launch))[
            0
        ]
        for launch in ("eager", "graph")
    )
    assert eager == pytest.approx(100 * load_gpu_table().host_s["eager"])
    assert graph < eager


def test_a_tile_starts_after_as_many_cycles_whatever_the_clock():
    """A multiprocessor of the same rate at twice the clock is half as wide: it loses half."""
    fast = replace(CHIP, clock_hz=2 * CHIP.clock_hz)
    assert CONSTANTS.tile_start(CHIP) == pytest.approx(CONSTANTS.k_start)
    assert CONSTANTS.tile_start(fast) == pytest.approx(CONSTANTS.k_start / 2)
    assert seconds_of(1, 4096, 4096, 64, chip=fast) < 0.8 * seconds_of(1, 4096, 4096, 64)


def test_the_table_goes_before_the_rule():
    table = load_gpu_table()
    device = get_accelerator("A100-80GB")
    share, basis = table.product_share(device, "bfloat16")
    assert basis == "table"
    assert share == table.devices["A100-80GB"].tensor
    assert table.without("A100-80GB").product_share(device, "bfloat16")[1] == "rule"


def test_a_device_without_figures_of_its_own_takes_those_of_its_chip():
    """The nearest in watts first; the rule is for chips of which nothing is known."""
    table = load_gpu_table().without("GB200")
    device = get_accelerator("GB200")
    assert [entry.name for entry in list_same_chip(device)] == ["B200"]
    assert table.product_share(device, "bfloat16") == (table.devices["B200"].tensor, "rule")
    unknown = table.without("B200").product_share(device, "bfloat16")
    assert unknown == (table.products["tensor"].share(device, "bfloat16"), "rule")
    assert list_same_chip(get_accelerator("A100-PCIe-40GB"))[0].name == "A100-PCIe"


def test_the_ceiling_falls_with_the_lanes_of_a_multiprocessor():
    """An RTX 3090 reaches 70 % of its float32 rate, a V100 with half as many lanes over 90."""
    rule = load_gpu_table().products["simt"]
    wide, narrow = (rule.share(get_accelerator(name), "float32") for name in ("RTX3090", "V100"))
    assert wide < 0.9 * narrow
    assert narrow == pytest.approx(rule.ceiling, rel=0.02)


def test_a_board_of_little_power_does_not_sustain_its_clock():
    """72 W are too few for the 30 TFLOP/s of an L4's data sheet; 450 W go further on a 4090."""
    table = load_gpu_table().without("L4")
    small, large = (
        table.product_share(get_accelerator(name), "float32")[0] for name in ("L4", "RTX4090")
    )
    assert small < 0.5
    assert small < 0.7 * large


@pytest.mark.parametrize(
    "entry", [e for e in CATALOGUE if e.backend != "cpu"], ids=lambda e: e.name
)
def test_every_device_has_what_the_rules_need(entry):
    assert min(entry.num_units, entry.cache_bytes, entry.board_watts, entry.node_nm) > 1
    for precision in entry.flops_per_s:
        assert 0.1 < load_gpu_table().product_share(entry, precision)[0] <= 1


@pytest.mark.parametrize(
    "entry", [e for e in CATALOGUE if e.backend != "cpu"], ids=lambda e: e.name
)
def test_no_model_is_said_to_reach_more_than_three_quarters_of_the_peak(entry):
    """Published training reaches 60 % or so, the best of products 80 (16 bits and tf32)."""
    for precision in set(entry.flops_per_s) - {"float32"}:
        rates = default_rates(entry, precision)
        assert rates.efficiency["matmul"] / rates.gpu.in_model <= 0.75
