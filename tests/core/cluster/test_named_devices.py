"""Clusters of devices by name."""

import pytest

from stagewright.core.cluster.accelerators import get_accelerator
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.cluster.shorthand import parse_devices
from stagewright.core.errors import InvalidInput
from stagewright.planner.plan import plan
from tests.core.affine import affine_profile


def test_one_kind_on_one_link():
    cluster = parse_devices("8xH200")
    assert {device.kind for device in cluster.devices} == {"H200"}
    assert cluster.devices[7].memory_bytes == get_accelerator("H200").memory_bytes
    assert [level.name for level in cluster.levels] == ["NVLink 4"]
    assert cluster.levels[0].bandwidth_bytes_per_s == 342.5e9, "not the data sheet's 450"


def test_nodes_have_two_levels():
    cluster = parse_devices("2x8xh100")
    assert [level.group_size for level in cluster.levels] == [8, 16]
    assert [level.name for level in cluster.levels] == ["NVLink 4", "network"]


def test_several_kinds_are_joined_by_the_slowest_link():
    cluster = parse_devices("2xH200, 4xL40S")
    assert [device.kind for device in cluster.devices] == ["H200"] * 2 + ["L40S"] * 4
    assert cluster.levels[0].name == "PCIe 4.0 x16"
    assert cluster.levels[0].bandwidth_bytes_per_s < 32e9, "what six cards have of their lanes"


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("16xH100", "2x8xH100"),
        ("64xA100", "8x8xA100-80GB"),
        ("24xRTX4090", "3x8xRTX4090"),
        ("144xGB200", "2x72xGB200"),
        ("8xH100,16xA100", "1x8xH100,2x8xA100-80GB"),
    ],
)
def test_more_than_a_node_holds_are_nodes_and_say_so(text, means):
    """Cause: 64 H100 were one NVLink domain, which no machine has, without a word."""
    found = parse_devices(text)
    (said,) = found.assumptions
    assert f"{text!r} is taken as {means!r}" in said
    assert found.model_copy(update={"assumptions": ()}) == parse_devices(means)
    made = plan(affine_profile(len(found.devices)), found)
    assert said in made.notes
    assert found.without(0).assumptions == found.assumptions


@pytest.mark.parametrize("text", ["8xH100", "72xGB200", "4xH100,4xA100", "1x16xH100", "64x24GB"])
def test_one_node_and_what_is_written_as_one_stay_one(text):
    cluster = parse_devices(text)
    assert [level.group_size for level in cluster.levels] == [len(cluster.devices)]
    assert cluster.assumptions == ()


@pytest.mark.parametrize("text", ["12xH100", "9xRTX3090", "8xH100,4xA100", "100xGB200"])
def test_devices_that_fill_no_whole_nodes_are_asked_for(text):
    with pytest.raises(InvalidInput, match="write which it has, such as '2x6xH100'"):
        parse_devices(text)


@pytest.mark.parametrize(
    ("text", "kind", "count"), [("1x3090", "RTX3090", 1), ("2x4090", "RTX4090", 2)]
)
def test_cards_named_by_digits_are_no_counts(text, kind, count):
    assert [device.kind for device in parse_devices(text).devices] == [kind] * count


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("2x7900XTX", "7900XTX"),
        ("2x7900XT", "7900XT"),
        ("2x8x7900XTX", "7900XTX"),
        ("8x910B", "910B"),
        ("2x1080Ti", "1080Ti"),
        ("4x6000Ada", "6000Ada"),
        ("2x580X", "580X"),
        ("2x8xFOO", "FOO"),
    ],
)
def test_an_unknown_device_is_named_as_written(text, name):
    """Cause: 2x7900XTX was 2 nodes of 7900 devices 'TX'."""
    with pytest.raises(InvalidInput, match=f"unknown device '{name}'"):
        parse_devices(text)


def test_names_are_read_wherever_a_cluster_is():
    """Cause: the command line took 8xH200, `Cluster.parse` and `plan` did not."""
    assert Cluster.parse("4xA100") == parse_devices("4xA100")
    made = plan(affine_profile(2), "2xH200")
    assert {name for stage in made.stages for name in stage.devices} <= {"H200:0", "H200:1"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("4xH900", "unknown device 'H900'; did you mean H200"),
        ("2xH200,4x24GB", "name every kind"),
        ("0xH200", "has 0 devices"),
        ("4x8xH100,2xH200", "nodes of different sizes"),
        ("H200", "cannot parse devices"),
        ("9999999xH200", "limited to 1048576"),
    ],
)
def test_refused_with_a_way_out(text, said):
    with pytest.raises(InvalidInput, match=said):
        parse_devices(text)
