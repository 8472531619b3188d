"""Links between pairs of groups: which devices they join, and what is refused."""

import pytest
from pydantic import ValidationError

from stagewright.core.cluster.cluster import Cluster, LinkLevel
from stagewright.core.cluster.pair_links import PairLink

INSIDE = LinkLevel(name="node", latency_s=1e-6, bandwidth_bytes_per_s=100e9)
BETWEEN = LinkLevel(name="network", latency_s=1e-5, bandwidth_bytes_per_s=10e9)


def pair(one, other, *, level="node", bandwidth=1e9):
    return PairLink(
        level=level, groups=(one, other), latency_s=0.0, bandwidth_bytes_per_s=bandwidth
    )


def nodes(*links, count=4, each=2):
    found = Cluster.of_nodes(count, each, inside=INSIDE, between=BETWEEN)
    return Cluster.model_validate({**found.model_dump(), "links": [x.model_dump() for x in links]})


def test_a_pair_link_joins_the_devices_of_two_nodes_and_no_others():
    cluster = nodes(pair("0", "2"))
    for one in range(8):
        for other in range(8):
            if one // 2 == other // 2:
                expected = 100e9
            else:
                expected = 1e9 if {one // 2, other // 2} == {0, 2} else 10e9
            assert cluster.link(one, other).bandwidth_bytes_per_s == expected


def test_groups_are_named_by_their_place_once_a_device_is_lost():
    cluster = nodes(pair("0", "2"), pair("1", "3")).without(4)
    assert cluster.link(0, 4).bandwidth_bytes_per_s == 1e9  # node 2 has device 5 left, now the 4th
    assert cluster.link(0, 3).bandwidth_bytes_per_s == 10e9
    assert [link.groups for link in nodes(pair("0", "2"), pair("1", "3")).without(4, 5).links] == [
        ("1", "3")
    ]


def test_a_cluster_without_pair_links_is_written_as_before():
    assert "links" not in nodes().to_json()
    again = Cluster.from_json(nodes(pair("0", "2")).to_json())
    assert again == nodes(pair("0", "2"))
    assert "node 0 and 2" in str(again)


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ([pair("0", "4")], "there is no node '4'"),
        ([pair("1", "1")], "give two different groups"),
        ([pair("0", "1"), pair("1", "0")], "two links join node 1 and 0"),
        ([pair("0", "1", level="rack")], "not the name of one level below the outermost"),
        ([pair("0", "1", level="network")], "not the name of one level below the outermost"),
    ],
)
def test_a_link_that_joins_no_pair_is_refused_by_name(links, message):
    with pytest.raises(ValidationError, match=message):
        nodes(*links)


def test_a_link_across_racks_names_the_racks():
    levels = [
        {"name": "node", "group_size": 2},
        {"name": "rack", "group_size": 4},
        {"name": "network", "group_size": 8},
    ]
    devices = [{"name": str(index)} for index in range(8)]
    document = {"devices": devices, "levels": levels}
    Cluster.model_validate({**document, "links": [pair("0", "1").model_dump()]})
    Cluster.model_validate({**document, "links": [pair("0", "1", level="rack").model_dump()]})
    with pytest.raises(ValidationError, match="give the link of the groups of 'rack'"):
        Cluster.model_validate({**document, "links": [pair("0", "2").model_dump()]})
    levels[1]["shared"] = True
    with pytest.raises(ValidationError, match="'rack' is shared"):
        Cluster.model_validate({**document, "links": [pair("0", "1").model_dump()]})
