"""Places of devices: groups by name, groups of different sizes, and devices lost in place."""

import pytest

from stagewright.core.cluster.cluster import Cluster, Device, LinkLevel
from stagewright.core.cluster.places import list_groups
from stagewright.core.cluster.shorthand import BETWEEN_NODES, INSIDE_NODE
from stagewright.core.errors import InvalidInput


def placed(*places, levels=("node", "network")):
    devices = tuple(Device(name=str(index), place=place) for index, place in enumerate(places))
    return Cluster(devices=devices, levels=tuple(LinkLevel(name=name) for name in levels))


def test_a_lost_device_leaves_the_others_where_they_are():
    cluster = Cluster.parse("4x8x80GB")
    left = cluster.without(20, "80GB:3")
    assert len(left.devices) == 30
    for one in range(30):
        for other in range(30):
            names = left.devices[one].name, left.devices[other].name
            before = [int(name.split(":")[1]) for name in names]
            assert left.link(one, other).name == cluster.link(*before).name
    assert Cluster.from_json(left.to_json()) == left
    assert "7, 8, 7, 8" in str(left)
    assert left.without("80GB:19") == cluster.without(3, 19, 20)


def test_a_device_that_does_not_exist_cannot_be_lost():
    cluster = Cluster.parse("2x2x80GB")
    for device in (4, -1, "80GB:9"):
        with pytest.raises(InvalidInput, match=r"no device .* from '80GB:0' to '80GB:3'"):
            cluster.without(device)
    with pytest.raises(InvalidInput, match="none of the cluster's 4"):
        cluster.without(0, 1, 2, 3)
    assert cluster.without() is cluster


def test_groups_are_by_name_in_any_order_and_of_any_size():
    cluster = placed(*({"node": name} for name in "abaab"))
    assert list_groups(cluster) == ((0, 1, 0, 0, 1), (0, 0, 0, 0, 0))
    assert [cluster.link(0, other).name for other in (1, 2)] == ["network", "node"]


def test_documents_without_places_keep_their_ids():
    written = Cluster.of_nodes(
        4, 8, inside=INSIDE_NODE, between=BETWEEN_NODES, kind="80GB", memory_bytes=80 * 10**9
    )
    assert written.content_id() == "cluster_62893262e62b220a0a2b808c2d457f68"
    assert '"place"' not in written.to_json()


@pytest.mark.parametrize(
    ("places", "levels", "said"),
    [
        ([{"node": "a"}, {}], ("node", "network"), "'node' has no group_size, and device '1'"),
        ([{"node": "a"}, {"rack": "a"}], ("node", "network"), "device '1' has a place in 'rack'"),
        ([{"node": "a"}] * 2, ("node", "node"), "two levels are named 'node'"),
        (
            [{"node": "a", "rack": "x"}, {"node": "a", "rack": "y"}],
            ("node", "rack", "network"),
            "node 'a' has devices in two groups of 'rack', 'x' and 'y'",
        ),
    ],
)  # fmt: skip
def test_places_that_contradict_each_other_are_refused_by_name(places, levels, said):
    with pytest.raises(ValueError, match=said):
        placed(*places, levels=levels)


def test_levels_of_one_name_get_numbers_where_places_need_names():
    levels = tuple(LinkLevel(group_size=size) for size in (2, 4, 8))
    left = Cluster(devices=Cluster.uniform(8).devices, levels=levels).without(5)
    assert [level.name for level in left.levels] == ["link", "link 2", "link 3"]
    assert left.devices[5].place == {"link": "3", "link 2": "1"}


def test_one_device_left_of_several_nodes_has_no_place():
    """Its levels went, and its places named them: no such cluster could be made."""
    cluster = Cluster.parse("2x2xcpu").without(0, 1, 3)
    assert [device.place for device in cluster.devices] == [{}]
    assert cluster.levels == ()
