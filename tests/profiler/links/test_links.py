"""Links between processes: found back from made-up times, and measured on the loopback."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from stagewright.core.cluster.cluster import Cluster, LinkLevel
from stagewright.core.errors import InvalidInput, MeasurementError, RankFailed
from stagewright.profiler.links.fit import all_reduce_s, fit_levels, fit_line
from stagewright.profiler.links.launch_local import (
    free_port,
    measure_links_here,
    measure_local_links,
)
from stagewright.profiler.links.levels import (
    find_group_sizes,
    find_levels,
    host_size,
    list_probes,
    number_hosts,
)
from stagewright.profiler.links.records import LevelTimes, LinkOptions, LinkTime, RankDevice
from stagewright.profiler.links.session import list_steps
from stagewright.profiler.links.timing import sizes_up_to

SIZES = sizes_up_to(64 * 2**20)
NODE = LinkLevel(
    name="node",
    group_size=4,
    latency_s=5e-6,
    bandwidth_bytes_per_s=150e9,
    all_reduce_bandwidth_bytes_per_s=110e9,
)
NETWORK = LinkLevel(
    name="network",
    group_size=16,
    latency_s=20e-6,
    bandwidth_bytes_per_s=24e9,
    all_reduce_bandwidth_bytes_per_s=17e9,
    shared=True,
)
LEVELS = (NODE, NETWORK)


def made_up_times(levels, index, num_ranks, noise, draw):
    """What the steps of a measurement would find at a level if links were as described."""
    cluster = Cluster.uniform(num_ranks)
    times = []
    for step in list_steps(find_all(levels), index, num_ranks):
        for size in SIZES:
            if step.what == "message":
                exact_s = levels[index].transfer_time_s(size)
            elif step.what == "all_reduce":
                entry = LinkTime(what="all_reduce", ranks=step.ranks, size_bytes=size, time_s=1)
                exact_s = all_reduce_s(cluster, levels[: index + 1], entry)
            else:
                continue
            time_s = exact_s * (1 + draw.uniform(-noise, noise))
            if draw.random() < 0.05 * bool(noise):
                time_s *= 30  # something else ran
            times.append(LinkTime(what=step.what, ranks=step.ranks, size_bytes=size, time_s=time_s))
    return LevelTimes(
        name=levels[index].name,
        group_size=levels[index].group_size,
        times=tuple(times),
        slowdown=None if index == 0 else 3.7,
    )


def find_all(levels):
    """The made-up levels as the measurement finds them: from hosts and the times of list_probes."""
    size = levels[0].group_size
    num_ranks = levels[-1].group_size
    cluster = Cluster.uniform(num_ranks).model_copy(update={"levels": levels})
    return find_levels(
        num_ranks,
        size,
        {pair: cluster.link(*pair).transfer_time_s(2**20) for pair in list_probes(num_ranks, size)},
    )


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("seed", range(5))
def test_latency_and_bandwidth_are_found_again(seed, noise):
    """Noise of 5 %, and one time in twenty 30 times too long."""
    draw = random.Random(seed)
    found = [made_up_times(LEVELS, index, 16, noise, draw) for index in (0, 1)]
    fits = fit_levels(found, Cluster.uniform(16))
    near = 1e-6 if not noise else 0.05
    for fit, level in zip(fits, LEVELS, strict=True):
        assert (fit.level.name, fit.level.group_size) == (level.name, level.group_size)
        assert fit.level.latency_s == pytest.approx(level.latency_s, rel=near)
        assert fit.level.bandwidth_bytes_per_s == pytest.approx(
            level.bandwidth_bytes_per_s, rel=near
        )
        assert fit.level.all_reduce_bandwidth_bytes_per_s == pytest.approx(
            level.all_reduce_bandwidth_bytes_per_s, rel=near
        )
        assert fit.level.shared == level.shared
        assert fit.message_error <= max(noise, 1e-9)
        assert fit.all_reduce_error is not None
        assert fit.all_reduce_error <= max(1.2 * noise, 1e-9)


def test_the_fitted_cluster_predicts_the_all_reduces_it_was_fitted_to():
    """A ring over two nodes of four by hand: 2 x 3 messages of a quarter, then 2 x 1 of half."""
    draw = random.Random(0)
    found = [made_up_times(LEVELS, index, 16, 0.0, draw) for index in (0, 1)]
    levels = tuple(fit.level for fit in fit_levels(found, Cluster.uniform(16)))
    cluster = Cluster.uniform(16).model_copy(update={"levels": levels})
    size = 64 * 2**20
    inside_s = 6 * (5e-6 + size / 4 / 110e9)
    between_s = 2 * (20e-6 + size / 4 / 2 / 17e9)
    assert cluster.all_reduce_time_s(size, 8, 1) == pytest.approx(inside_s + between_s, rel=1e-6)


def test_a_wrong_formula_shows_as_a_fit_error(monkeypatch):
    """All-reduces in n messages, not 2 (n-1): at no bandwidth do latency and bytes both fit."""

    def wrong(self, size_bytes, num_ranks):
        bandwidth = self.all_reduce_bandwidth_bytes_per_s or self.bandwidth_bytes_per_s
        return num_ranks**2 * self.latency_s + size_bytes / bandwidth

    times = [made_up_times(LEVELS, 0, 16, 0.0, random.Random(0))]
    monkeypatch.setattr(LinkLevel, "all_reduce_time_s", wrong)
    (fit,) = fit_levels(times, Cluster.uniform(16))
    assert fit.worst_error > 0.3


def test_one_line():
    points = [(size, 3e-5 + size / 2e9) for size in (4096, 2**20, 2**24)]
    latency_s, bandwidth = fit_line(points)
    assert latency_s == pytest.approx(3e-5)
    assert bandwidth == pytest.approx(2e9)


def test_a_latency_is_never_below_zero():
    latency_s, bandwidth = fit_line([(2**18, 0.2e-3), (2**20, 1e-3), (2**24, 16.1e-3)])
    assert latency_s == 0
    assert bandwidth == pytest.approx(2**20 / 1e-3, rel=0.15)


def test_times_that_do_not_grow_bound_the_bandwidth_from_below():
    assert fit_line([(2**10, 2e-3), (2**20, 1e-3)])[1] == 2**20 / 1e-3


def test_one_size_tells_nothing():
    with pytest.raises(MeasurementError, match="two sizes"):
        fit_line([(1024, 1e-5), (1024, 2e-5)])


def ranks_of(*hosts, local_ranks=None, names=None):
    """Ranks of hosts with so many each, as a launcher numbers them."""
    found = []
    for number, held in enumerate(hosts):
        for local in range(held):
            found.append(
                RankDevice(
                    host=names[number] if names else f"host{number}",
                    group_rank=number if local_ranks is None else len(found),
                    local_rank=local,
                    local_ranks=held if local_ranks is None else local_ranks,
                )
            )
    return found


def test_ranks_of_one_host_are_told_by_group_or_by_name():
    assert number_hosts(ranks_of(2, 2)) == [0, 0, 1, 1]
    assert number_hosts(ranks_of(2, 2, names=["same", "same"])) == [0, 0, 1, 1]
    assert number_hosts(ranks_of(2, 2, local_ranks=1)) == [0, 0, 1, 1]  # a launcher for each rank
    assert number_hosts([RankDevice(host=name) for name in "aab"]) == [0, 0, 1]


@pytest.mark.parametrize(
    ("held", "size", "said"),
    [
        ((4,), 4, ""),
        ((4, 4, 4), 4, ""),
        ((4, 4, 2), 4, ""),
        ((4, 2, 4), 2, "only 2 consecutive"),
        ((2, 4), 2, "only 2 consecutive"),
        ((3, 4), 1, "only 1 consecutive"),
    ],
)
def test_host_size(held, size, said):
    found, remark = host_size(number_hosts(ranks_of(*held)))
    assert found == size
    assert said in remark
    assert bool(said) == bool(remark)


def test_hosts_that_alternate_are_told_apart_by_no_group():
    size, remark = host_size([0, 1, 0, 1])
    assert size == 1
    assert "host by host" in remark


def test_groups_are_found_where_times_fall_clearly_apart():
    def times(near_s, far_s):
        return {
            (a, b): near_s if a // 2 == b // 2 else far_s for a in range(8) for b in range(a + 1, 8)
        }

    assert find_group_sizes(8, times(1.0, 5.0)) == [2]
    assert find_group_sizes(8, times(1.0, 1.8)) == []
    assert find_group_sizes(8, {pair: 1.0 for pair in times(1, 1)}) == []
    quads = {
        (a, b): 1.0 if a // 2 == b // 2 else 4.0 if a // 4 == b // 4 else 20.0
        for a, b in times(1, 1)
    }
    assert find_group_sizes(8, quads) == [2, 4]


def test_levels_between_hosts_too():
    """Two racks of two hosts of two."""
    times = {
        (a, b): 1.0 if a // 2 == b // 2 else 5.0 if a // 4 == b // 4 else 40.0
        for a, b in list_probes(8, 2)
    }
    levels = [(level.name, level.group_size) for level in find_levels(8, 2, times)]
    assert levels == [("node", 2), ("2 nodes", 4), ("network", 8)]
    assert find_levels(1, 1, {}) == []


def test_probes_grow_with_hosts_not_with_ranks_squared():
    assert list_probes(4, 4) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert list_probes(3, 1) == [(0, 1), (0, 2), (1, 2)]
    assert len(list_probes(4096, 8)) == 28 + 66


pytestmark = pytest.mark.timeout(240)


@pytest.mark.distributed
def test_two_processes_measure_their_link():
    cluster = measure_local_links(2, budget_s=1)
    (level,) = cluster.levels
    assert [device.memory_bytes for device in cluster.devices] == [None, None]
    assert 0 <= level.latency_s < 1
    assert level.bandwidth_bytes_per_s > 1e6


@pytest.mark.distributed
def test_progress_and_report_of_ranks_started_here(forked_python):
    seen = []
    options = LinkOptions(device="cpu", budget_s=0.5, largest_bytes=2**20)
    report = measure_links_here(3, options, lambda done, total, what: seen.append((done, total)))
    assert [done for done, _ in seen] == list(range(len(seen)))
    assert seen[-1][0] == seen[-1][1] - 1
    (fit,) = report.levels
    assert fit.level.group_size == 3
    assert report.backend == "gloo"
    messages = {entry.ranks for entry in fit.measured.times if entry.what == "message"}
    assert messages == {(0, 1), (1, 0), (1, 2), (2, 1)}
    sums = [entry for entry in fit.measured.times if entry.what == "all_reduce"]
    assert {entry.ranks for entry in sums} == {(0, 1, 2)}
    assert [entry.size_bytes for entry in sums] == sizes_up_to(2**20)
    assert all(0 < entry.least_s <= entry.time_s for entry in fit.measured.times)


def test_one_rank_has_no_links():
    with pytest.raises(InvalidInput, match="at least two ranks, not 1"):
        measure_links_here(1, LinkOptions())


class Launched:
    """Ranks started as on two hosts; ends them all."""

    def __init__(self, ranks, size=4, **options):
        port = free_port()
        self.processes = []
        for rank in ranks:
            own = {**{"device": "cpu", "budget_s": 0.5, "largest_bytes": 2**20}, **options}
            own = {
                key: value[rank] if isinstance(value, list) else value for key, value in own.items()
            }
            environment = {
                **os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size),
                "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": str(rank // 2),
            }  # fmt: skip
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "stagewright.profiler.links.rank_main", json.dumps(own)],
                    env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                )
            )  # fmt: skip

    def __enter__(self):
        return self.processes

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.communicate()


def last_line(text):
    return json.loads(text.strip().splitlines()[-1])


@pytest.mark.distributed
def test_two_hosts_become_two_levels(forked_python):
    with Launched(range(4)) as processes:
        outputs = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs
    assert all(not stdout for stdout, _ in outputs[1:])
    report = last_line(outputs[0][0])["report"]
    cluster = Cluster.model_validate(report["cluster"])
    assert [(level.name, level.group_size) for level in cluster.levels] == [
        ("node", 2),
        ("network", 4),
    ]
    assert [device.name for device in cluster.devices] == [
        "node0/cpu:0", "node0/cpu:1", "node1/cpu:0", "node1/cpu:1",
    ]  # fmt: skip
    network = report["levels"][1]["measured"]
    sums = {tuple(one["ranks"]) for one in network["times"] if one["what"] == "all_reduce"}
    assert sums == {(0, 2), (0, 1, 2, 3)}
    assert network["slowdown"] > 0
    assert report["levels"][0]["measured"]["slowdown"] is None


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("there", "said"),
    [
        (0, "rank 0 waited for ranks 1 and 2 to join: not there in 2 s"),
        (1, "rank 1 waited for rank 0 to open the store that all ranks meet at: no answer in 2 s"),
    ],
)
def test_ranks_that_never_come_are_named(there, said, forked_python):
    with Launched([there], size=3, timeout_s=2.0) as (process,):
        _, stderr = process.communicate(timeout=200)
    assert process.returncode == 5
    assert said in last_line(stderr)["message"]


@pytest.mark.distributed
def test_a_rank_that_dies_ends_the_others_and_is_named(forked_python):
    with Launched(
        range(3), 3, budget_s=60.0, timeout_s=60.0, largest_bytes=64 * 2**20
    ) as processes:
        first = processes[0].stdout.readline()
        assert "done" in first  # they have joined and are measuring
        processes[2].send_signal(signal.SIGKILL)
        started = time.monotonic()
        ended = {rank: processes[rank].communicate(timeout=200) for rank in (0, 1)}
        assert time.monotonic() - started < 60  # by their connections, not by the timeout
    assert [processes[rank].returncode for rank in (0, 1)] == [5, 5]
    for rank, (_, stderr) in ended.items():
        assert f"rank 2 stopped answering; rank {rank} waited for" in stderr


@pytest.mark.distributed
def test_ranks_with_different_options_are_refused_by_all(forked_python):
    with Launched(range(2), 2, budget_s=[1.0, 2.0]) as processes:
        ended = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [1] * 2
    assert all(last_line(stderr)["kinds"][0] == "InvalidInput" for _, stderr in ended)
    assert "different options" in ended[0][1]


def test_ranks_that_fail_here_are_one_error(monkeypatch, forked_python):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "absent0")
    with pytest.raises(RankFailed, match=r"rank [01] waited for rank [01] to connect"):
        measure_links_here(2, LinkOptions(device="cpu"))
