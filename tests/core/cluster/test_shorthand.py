"""Devices as people write them on a command line."""

import re
from collections import Counter
from itertools import groupby
from operator import attrgetter

import pytest

from stagewright.core.cluster.accelerators import find_card_bytes
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.cluster.shorthand import BETWEEN_NODES, INSIDE_NODE, enlarge
from stagewright.core.errors import InvalidInput


@pytest.mark.parametrize(
    ("text", "count", "memory_bytes"),
    [
        ("4x24GB", 4, find_card_bytes(24)),
        ("4x23GB", 4, 23 * 10**9),
        ("4x24000MB", 4, 24 * 10**9),
        ("8x80GiB", 8, 80 * 2**30),
        ("2x512MB", 2, 512 * 10**6),
        ("2x100KB", 2, 100 * 10**3),
        ("1x64KiB", 1, 64 * 2**10),
        (" 1x1.5gib ", 1, int(1.5 * 2**30)),
        ("2xcpu", 2, None),
    ],
)
def test_equal_devices_share_one_link(text, count, memory_bytes):
    cluster = Cluster.parse(text)
    assert [device.memory_bytes for device in cluster.devices] == [memory_bytes] * count
    (kind,) = {device.kind for device in cluster.devices}
    assert cluster == Cluster.uniform(count, kind=kind, memory_bytes=memory_bytes)


def test_nodes_have_a_fast_link_inside_and_a_network_between():
    cluster = Cluster.parse("4x8x80GB")
    assert cluster == Cluster.of_nodes(
        4,
        8,
        inside=INSIDE_NODE,
        between=BETWEEN_NODES,
        kind="80GB",
        memory_bytes=find_card_bytes(80),
    )
    assert [(level.name, level.group_size) for level in cluster.levels] == [
        ("node", 8),
        ("network", 32),
    ]
    assert cluster.link(0, 7).bandwidth_bytes_per_s > cluster.link(7, 8).bandwidth_bytes_per_s


@pytest.mark.parametrize(
    ("text", "names"), [("1x8x80GB", ["node"]), ("4x1x80GB", ["network"]), ("1x1xcpu", ["node"])]
)
def test_a_level_that_would_join_nothing_is_left_out(text, names):
    assert [level.name for level in Cluster.parse(text).levels] == names


def test_kinds_stand_in_the_order_written_and_names_stay_unique():
    cluster = Cluster.parse("2x80GB, 3x24GB,1x80GB")
    assert [device.name for device in cluster.devices] == [
        "80GB:0", "80GB:1", "24GB:0", "24GB:1", "24GB:2", "80GB:2",
    ]  # fmt: skip
    assert [level.group_size for level in cluster.levels] == [6]


def test_nodes_of_several_kinds():
    cluster = Cluster.parse("2x4x80GB,1x4x24GB")
    assert Counter(device.kind for device in cluster.devices) == {"80GB": 8, "24GB": 4}
    assert [level.group_size for level in cluster.levels] == [4, 12]


@pytest.mark.parametrize("text", ["2x8x80GB,4x24GB", "2x8x80GB,2x4x24GB"])
def test_nodes_that_do_not_nest_need_a_file(text):
    with pytest.raises(InvalidInput, match="equally many devices per node"):
        Cluster.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "4",
        "x24GB",
        "4x24",
        "4x24PB",
        "-1xcpu",
        "2x3x4x24GB",
        "2x80GB,",
        ",2xcpu",
        "2x80GB;2xcpu",
    ],
)
def test_what_is_not_shorthand_is_refused_with_what_is(text):
    with pytest.raises(InvalidInput, match="'4x8x80GB' for 4 nodes of 8, '2x80GB,4x24GB'"):
        Cluster.parse(text)


@pytest.mark.parametrize("text", ["0xcpu", "0x8x80GB", "8x0x80GB", "2xcpu,0xcpu"])
def test_no_devices_are_no_part_of_a_cluster(text):
    with pytest.raises(InvalidInput, match="at least one"):
        Cluster.parse(text)


def test_exactly_as_many_as_allowed_are_read_and_one_more_is_not():
    assert len(Cluster.parse("2x3xcpu", max_devices=6).devices) == 6
    with pytest.raises(InvalidInput, match="has 6 devices; shorthand is limited to 5"):
        Cluster.parse("2x3xcpu", max_devices=5)


@pytest.mark.parametrize("text", ["999999999x999999999xcpu", "9" * 10_000 + "xcpu", "1x2e9GB",
                                  "1x" + "9" * 30 + "GB", ",".join(["1xcpu"] * 5000)])  # fmt: skip
def test_too_much_is_refused_at_once_and_briefly(text):
    with pytest.raises(InvalidInput) as caught:
        Cluster.parse(text)
    assert len(str(caught.value)) < 400


def test_the_documented_clusters_can_be_read(repository):
    text = (repository / "docs" / "guides" / "clusters.md").read_text()
    example, _links = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    cluster = Cluster.from_json(example)
    assert [len(list(run)) for _, run in groupby(cluster.devices, key=attrgetter("kind"))] == [4, 2]
    written = re.findall(r"^\| (`.+`) \|", text.partition("## A cluster file")[0], re.MULTILINE)
    shorthand = re.findall(r"`(\S+?)`", " ".join(written))
    assert len(shorthand) >= 7
    for entry in shorthand:
        assert Cluster.parse(entry).devices, entry


def test_the_documented_links_are_the_ones_assumed(repository):
    text = (repository / "docs" / "guides" / "clusters.md").read_text()
    links = (Cluster.parse("2xcpu").levels[0], INSIDE_NODE, BETWEEN_NODES)
    for name, link in zip(("one link", "inside a node", "between nodes"), links, strict=True):
        bandwidth = f"{link.bandwidth_bytes_per_s / 1e9:g} GB/s"
        assert f"| {name} | {bandwidth} | {link.latency_s * 1e6:g} us |" in text


@pytest.mark.parametrize(("text", "size"), [("2x1TB", 10**12), ("2x1.5TiB", 3 * 2**39)])
def test_terabytes_are_units_too(text, size):
    assert [device.memory_bytes for device in Cluster.parse(text).devices] == [size, size]


@pytest.mark.parametrize(
    ("text", "count", "larger"),
    [
        ("1xRTX4090", 3, "3xRTX4090"),
        ("2xRTX4090", 14, "16xRTX4090"),
        ("16xH100", 17, "24xH100"),
        ("2x6xH100", 13, "3x6xH100"),
        ("1x12xH100", 13, "2x12xH100"),
        ("2x1xH100", 3, "3x1xH100"),
        ("4x24GB", 9, "9x24GB"),
        ("2xcpu", 3, "3xcpu"),
    ],
)
def test_more_devices_are_as_shorthand_builds_them(text, count, larger):
    assert enlarge(Cluster.parse(text), count) == (larger, Cluster.parse(larger))


def test_other_clusters_have_no_shorthand():
    assert enlarge(Cluster.parse("2x80GB,4x24GB"), 8) is None
    assert enlarge(Cluster.uniform(2, memory_bytes=10**9), 8) is None
