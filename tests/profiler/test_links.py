"""Links between processes, measured and fitted."""

import pytest

from stagewright.profiler.links import fit_line, measure_local_links


def test_a_line_is_found_again():
    points = [(size, 3e-5 + size / 2e9) for size in (4096, 2**20, 2**24)]
    latency_s, bandwidth = fit_line(points)
    assert latency_s == pytest.approx(3e-5)
    assert bandwidth == pytest.approx(2e9)


@pytest.mark.distributed
def test_two_processes_measure_their_link():
    cluster = measure_local_links(2)
    (level,) = cluster.levels
    assert len(cluster.devices) == 2
    assert 0 <= level.latency_s < 1
    assert level.bandwidth_bytes_per_s > 1e6
    assert level.all_reduce_bandwidth_bytes_per_s is not None
