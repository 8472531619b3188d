"""All-reduces by message size and devices, from the table of links."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from statistics import mean

import pytest

from stagewright.core.cluster.accelerators import CATALOGUE, get_accelerator
from stagewright.core.cluster.cluster import Cluster, LinkLevel
from stagewright.core.cluster.collectives import LinkFigures, load_link_table

PUBLISHED = Path(__file__).parents[3] / "benchmarks" / "published"

LINK = LinkFigures(
    basis="table",
    source="this test",
    start_s=1e-6,
    step_s=1e-6,
    small_share=0.01,
    large_start_s=1e-4,
    large_step_s=0,
    bandwidth=((2, 1e11), (8, 1e10)),
    error_band=0.1,
)


def test_small_messages_take_the_protocol_with_little_delay():
    assert LINK.all_reduce_time_s(1000, 2) == pytest.approx(2e-6 + 1e-6)
    assert LINK.all_reduce_time_s(10**9, 2) == pytest.approx(1e-4 + 1e-2)


def test_bandwidth_between_measured_counts_is_between_theirs():
    assert LINK.bus_bandwidth(4) == pytest.approx(1e10**0.5 * 1e11**0.5)
    assert LINK.bus_bandwidth(64) == 1e10


def test_one_device_sums_nothing():
    assert LINK.all_reduce_time_s(10**9, 1) == 0


def test_every_link_of_the_catalogue_has_figures():
    table = load_link_table()
    missing = {entry.link for entry in CATALOGUE if entry.backend != "cpu"} - set(table)
    assert not missing
    assert all(figures.source for figures in table.values())


def figures_of(text):
    """All-reduces inside a node of a named cluster."""
    return Cluster.parse(text).levels[0].all_reduce


def test_cards_of_a_host_share_its_lanes():
    """8 cards without a switch sum slower each than 2; with one they do not."""
    pcie, nvlink = (
        [figures_of(f"{count}x{name}").bus_bandwidth(count) for count in (2, 8)]
        for name in ("L40S", "A100-80GB")
    )
    assert pcie[1] < 0.8 * pcie[0]
    assert nvlink[1] > 0.8 * nvlink[0]


def test_some_cards_of_a_host_have_no_more_of_its_lanes_than_all_at_once():
    """The other stages sum at the same time. Behind a switch, two have what two have."""
    assert figures_of("8xL40S").bus_bandwidth(2) == figures_of("8xL40S").bus_bandwidth(8)
    assert figures_of("8xL40S").bus_bandwidth(2) < figures_of("2xL40S").bus_bandwidth(2)
    assert figures_of("8xH100").bus_bandwidth(2) == figures_of("2xH100").bus_bandwidth(2)
    assert figures_of("4xMI250").bus_bandwidth(2) == figures_of("16xMI250").bus_bandwidth(2)


@pytest.mark.parametrize("text", ["1x1025xH100", "2x900xL40S", "200xMI300X"])
def test_more_devices_than_were_measured_have_the_bandwidth_of_the_most(text):
    count, name = re.findall(r"(\d+)x([A-Z].*)", text)[0]
    largest = load_link_table()[get_accelerator(name).link].bandwidth[-1][1]
    assert figures_of(text).bus_bandwidth(int(count)) == largest


def test_cards_without_peer_to_peer_are_slower_than_those_with():
    with_it, without = (figures_of(f"2x{name}").bus_bandwidth(2) for name in ("L40S", "RTX4090"))
    assert without < 0.7 * with_it


def test_a_mesh_sums_over_as_many_rings_as_a_device_has_peers():
    """MI300X took MI250's measurements for its own, and was five times too slow among eight."""
    two, eight = (figures_of("8xMI300X").bus_bandwidth(count) for count in (2, 8))
    assert eight == pytest.approx(7 * two, rel=1e-3)
    assert two < get_accelerator("MI300X").link_bandwidth_bytes_per_s
    table = load_link_table()
    assert {table[get_accelerator(name).link].basis for name in ("MI300X", "MI250")} == {"table"}


@pytest.mark.parametrize("count", [2, 4, 8])
def test_some_of_eight_take_the_time_that_was_measured_of_so_many(count):
    """Two H100s were 1.4 times too fast, as if all eight summed; small sums three times."""
    cluster = Cluster.parse("8xH100")
    with (PUBLISHED / "all_reduces.csv").open(encoding="utf-8") as stream:
        rows = [
            row
            for row in csv.DictReader(stream)
            if (row["device"], row["num_devices"]) == ("H100", str(count))
        ]
    errors = [
        cluster.all_reduce_time_s(int(row["size_bytes"]), count, 0) / float(row["time_us"]) * 1e6
        - 1
        for row in rows
    ]
    assert mean(map(abs, errors)) < 0.15


@pytest.mark.parametrize("kinds", [("4xL40S", "4xRTX4090"), ("4xRTX4090", "4xL40S")])
def test_cards_of_several_kinds_sum_as_the_slowest_link_of_them_whatever_their_order(kinds):
    """Both are on PCIe 4.0 x16, and a data sheet says no more."""
    level = Cluster.parse(",".join(kinds)).levels[0]
    assert level.all_reduce == figures_of("8xRTX4090")
    assert level.error_band == load_link_table()[get_accelerator("RTX4090").link].error_band


@pytest.mark.parametrize("kinds", [("MI250", "MI300X"), ("MI250", "A100-PCIe"), ("L4", "H100")])
def test_several_kinds_sum_no_faster_than_either_at_any_size_and_number(kinds):
    mixed = Cluster.parse(",".join(f"4x{kind}" for kind in kinds)).levels[0]
    for count in (2, 3, 4, 8):
        for size in (10**3, 10**6, 10**9):
            alone = [figures_of(f"8x{kind}").all_reduce_time_s(size, count) for kind in kinds]
            assert mixed.all_reduce_time_s(size, count) >= max(alone) * (1 - 1e-9)


def test_the_slowest_sum_is_that_of_the_table_not_of_the_data_sheet():
    """Infinity Fabric states 50 GB/s, PCIe 5.0 64, but copies through a host sum far slower."""
    level = Cluster.parse("1xMI210,1xRTX5090").levels[0]
    figures = load_link_table()[get_accelerator("RTX5090").link]
    assert level.name == get_accelerator("RTX5090").link
    assert level.all_reduce.bus_bandwidth(2) == figures.bus_bandwidth(2)
    assert level.bandwidth_bytes_per_s == figures.bus_bandwidth(2)


def test_a_message_takes_what_two_devices_were_measured_to_exchange():
    """Not the data sheet's rate: 32 GB/s over PCIe 4.0, and 9 where copies go through the host."""
    rates = {
        name: Cluster.parse(f"2x{name}").levels[0].bandwidth_bytes_per_s / 1e9
        for name in ("L40S", "RTX4090", "A100-80GB", "MI250")
    }
    assert rates["L40S"] == pytest.approx(22.3, rel=0.05)
    assert rates["RTX4090"] == pytest.approx(9, rel=0.05)
    assert rates["A100-80GB"] == pytest.approx(164, rel=0.15)
    assert rates["MI250"] == 50, "a link's, though a package sums over four"


@pytest.mark.parametrize("entry", [one for one in CATALOGUE if one.backend != "cpu"], ids=str)
def test_a_large_message_takes_half_of_what_two_devices_sum_its_double_in(entry):
    level = Cluster.parse(f"2x{entry.name}").levels[0]
    for size in (10**7, 10**9):
        sent_s, summed_s = level.transfer_time_s(size), level.all_reduce_time_s(2 * size, 2)
        assert sent_s > 0.499 * summed_s
        if level.bandwidth_bytes_per_s == level.all_reduce.bus_bandwidth(2):
            figures = level.all_reduce
            start_s = figures.large_start_s + figures.large_step_s / 2
            assert level.latency_s == pytest.approx(start_s)
            assert sent_s == pytest.approx(start_s + size / figures.bus_bandwidth(2))
            assert sent_s < summed_s


def test_a_link_scaled_is_faster_in_everything():
    level = Cluster.parse("8xH100").levels[0]
    fast = level.scale(bandwidth_factor=2, delay_factor=0.5)
    assert fast.transfer_time_s(10**6) == pytest.approx(level.transfer_time_s(10**6) / 2)
    for size in (10**3, 10**9):
        assert fast.all_reduce_time_s(size, 4) == pytest.approx(
            level.all_reduce_time_s(size, 4) / 2
        )


def test_figures_of_one_protocol_need_no_more_than_a_start_and_bandwidths():
    document = {"start_s": 15e-6, "step_s": 1e-6, "bandwidth": [[2, 20e9], [4, 35e9]]}
    figures = LinkLevel.model_validate({"all_reduce": document}).all_reduce
    assert figures.all_reduce_time_s(8, 2) == pytest.approx(16e-6, rel=1e-3)
    assert figures.all_reduce_time_s(10**9, 4) == pytest.approx(18e-6 + 1.5e9 / 35e9)
    with pytest.raises(ValueError, match="start_s"):
        LinkLevel.model_validate({"all_reduce": document | {"start_s": "soon"}})


def test_sums_have_one_bandwidth_or_figures_not_both():
    level = Cluster.parse("8xH100").levels[0].model_dump()
    with pytest.raises(ValueError, match="give one"):
        LinkLevel.model_validate(level | {"all_reduce_bandwidth_bytes_per_s": 1e9})
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        LinkLevel.model_validate(
            level | {"all_reduce": level["all_reduce"] | {"bandwidth": [[2, 5e-324]]}}
        )
    knots = {"bandwidth": [[4, 1e9], [2, 1e9]]}
    with pytest.raises(ValueError, match="must rise"):
        LinkLevel.model_validate(level | {"all_reduce": level["all_reduce"] | knots})


def test_hosts_that_differ_have_a_wide_band_and_switches_a_narrow_one():
    table = load_link_table()
    assert table["PCIe 4.0 x16"].error_band > 0.5
    assert table["NVLink 4"].error_band < 0.3


def test_the_small_protocol_has_a_share_of_the_bandwidth():
    """A share of each count's, or it would be the faster one wherever large messages are slow."""
    assert LINK.all_reduce_time_s(10**6, 8) == pytest.approx(1e-4 + 2 * 7 / 8 * 1e6 / 1e10)
    with pytest.raises(ValueError, match="less than or equal to 1"):
        LinkFigures.model_validate(LINK.model_dump() | {"small_share": 1.5})
