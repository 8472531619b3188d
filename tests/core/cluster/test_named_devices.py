"""Clusters of devices by name."""

import pytest

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.cluster.shorthand import parse_devices
from stagewright.core.errors import InvalidInput
from stagewright.planner.plan import plan
from tests.core.affine import affine_profile


def test_one_kind_on_one_link():
    cluster = parse_devices("8xH200")
    assert {device.kind for device in cluster.devices} == {"H200"}
    assert cluster.devices[7].memory_bytes == 141 * 10**9
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
