"""The catalogue of devices: found by name, by what drivers say, and by memory."""

import pytest

from stagewright.core.cluster.accelerators import (
    CATALOGUE,
    check_precision,
    default_precision,
    find_by_driver_name,
    find_by_memory,
    find_card_bytes,
    get_accelerator,
)
from stagewright.core.cluster.reserves import usual_reserves
from stagewright.core.errors import InvalidInput


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)
def test_found_under_every_name(entry):
    for name in (entry.name, entry.name.lower(), *entry.aliases):
        assert get_accelerator(name) is entry


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)
def test_figures_are_ordered_as_hardware_is(entry):
    """Sparse rates, or both directions of a link, taken by mistake would break one of these."""
    rates = entry.flops_per_s
    if entry.backend != "cpu":
        order = [rates[name] for name in ("float32", "tf32", "float16") if name in rates]
        assert order == sorted(order)
        if entry.name != "MI100":  # whose bfloat16 is half as fast
            assert rates.get("bfloat16") in (None, rates.get("float16"))
    assert entry.link_bandwidth_bytes_per_s < entry.bandwidth_bytes_per_s
    assert len(entry.source) > 20


def test_dense_rates_of_data_sheets():
    assert get_accelerator("A100").flops_per_s["bfloat16"] == 312e12
    assert get_accelerator("h100").flops_per_s["bfloat16"] == 989.5e12  # 1,979 sparse
    assert get_accelerator("L4").flops_per_s["bfloat16"] == 121e12  # 242 sparse


def test_a_device_without_bfloat16_takes_float16_and_says_so():
    """A V100 was once estimated at its float16 rate in bfloat16, which it does not have."""
    v100, a100, cpu = get_accelerator("V100"), get_accelerator("A100"), get_accelerator("CPU")
    assert v100.flops_per_s["float16"] == 125e12
    assert default_precision([v100]) == default_precision([a100, v100]) == "float16"
    assert default_precision([a100, cpu]) == "bfloat16"
    assert default_precision([cpu, a100]) == "float32"
    with pytest.raises(
        InvalidInput, match="V100 SXM2 16 GB does not support bfloat16; it supports"
    ):
        check_precision(v100, "bfloat16")
    check_precision(cpu, "bfloat16")


@pytest.mark.parametrize(
    ("device_name", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_found_by_what_drivers_report(device_name, name):
    found = find_by_driver_name(device_name)
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize(
    "device_name",
    [
        "NVIDIA GH200 480GB",
        "NVIDIA H200 NVL",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "Tesla P100-SXM2-16GB",
        "Tesla V100-FHHL-16GB",
    ],
)
def test_a_slower_or_faster_namesake_is_no_device_of_the_catalogue(device_name):
    assert find_by_driver_name(device_name) is None


@pytest.mark.parametrize("name", ["V100", "V100-PCIe", "T4", "P100"])
def test_tf32_is_refused_where_there_is_none(name):
    with pytest.raises(InvalidInput, match="does not support tf32"):
        check_precision(get_accelerator(name), "tf32")


def test_a_processor_is_no_gpu():
    assert find_by_driver_name("AMD EPYC") is None
    # A slice of a card has its name, and a seventh of its speed.
    assert find_by_driver_name("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None


def test_unknown_device_lists_the_catalogue():
    with pytest.raises(InvalidInput) as caught:
        get_accelerator("H900")
    assert all(entry.name in str(caught.value) for entry in CATALOGUE)
    assert "did you mean" in str(caught.value)


REPORTED_GIB = {"A100-80GB": 79.20, "RTX4090": 23.64, "RTX3090": 23.70, "RTX3060": 11.76}
"""What torch reported in public error messages; their sources are in the catalogue."""


@pytest.mark.parametrize(("name", "gib"), REPORTED_GIB.items())
def test_a_card_has_the_memory_that_torch_reports(name, gib):
    """Cause: 80e9 bytes for a card on which torch finds 79.2 GiB: what had run did not fit."""
    assert get_accelerator(name).memory_bytes / 2**30 == pytest.approx(gib, abs=0.005)


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)
def test_no_card_reports_more_than_it_has_or_much_less(entry):
    if entry.backend == "cpu":
        assert (entry.memory_gb, entry.memory_bytes) == (0, 0)
        return
    nominal = entry.memory_gb * 2**30
    # HBM3e is sold by decimal gigabytes, and error correction takes a fourteenth of GDDR6.
    assert 0.915 * nominal < entry.memory_bytes < nominal
    assert entry.memory_source


def test_reserves_leave_room_for_a_run_that_was_seen():
    """70.09 GB were in use on an A100 of 80 GB (hpcaitech/ColossalAI issue 4537)."""
    available = get_accelerator("A100-80GB").memory_bytes
    reserved = usual_reserves("cuda", "estimated", 8).of_device(available).total_bytes
    assert available - reserved > 70.09 * 2**30


def test_found_by_memory():
    assert {entry.name for entry in find_by_memory(24 * 10**9)} == {
        "RTX4090", "L4", "A10G", "RTX3090",
    }  # fmt: skip
    assert find_by_memory(24 * 10**9)[0].name == "RTX4090"
    assert find_by_memory(80 * 10**9)[0].name == "A100-80GB"
    assert find_by_memory(141 * 10**9)[0].name == "H200"
    assert find_by_memory(5 * 10**9) == ()


@pytest.mark.parametrize("size", sorted({one.memory_gb for one in CATALOGUE if one.memory_gb}))
def test_a_size_is_the_usual_card_of_that_size(size):
    """Cause: 8GB was a P4 of 2016, whose want of 16-bit types decided the precision of all."""
    memory_bytes = find_card_bytes(size)
    usual = find_by_memory(memory_bytes)[0]
    assert (usual.memory_gb, usual.memory_bytes) == (size, memory_bytes)
    assert find_by_memory(size * 10**9)[0] is usual
    assert "bfloat16" in usual.flops_per_s
    assert find_card_bytes(size + 0.5) is None


@pytest.mark.parametrize("name", ["1080Ti", "6000Ada", "580X", "Gaudi2", "Trainium"])
def test_a_card_that_is_not_like_any_is_not_taken_for_one(name):
    with pytest.raises(InvalidInput, match=f"unknown device '{name}'. The catalogue has"):
        get_accelerator(name)
