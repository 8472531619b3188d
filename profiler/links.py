"""Measure how processes of this machine talk to each other, and write it down as a cluster."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

from ..core.cluster import Cluster
from ..core.errors import MeasurementError

TIMEOUT_S = 120.0


def measure_local_links(num_ranks: int, *, kind: str = "cpu") -> Cluster:
    """Start ``num_ranks`` processes on the loopback address and time messages between two.

    Latency and bandwidth are fitted to point-to-point round trips over several sizes; the
    all-reduce bandwidth comes from an all-reduce of 32 MiB.

    Raises:
        MeasurementError: The processes could not talk to each other.
    """
    if num_ranks < 2:
        return Cluster.uniform(num_ranks, kind=kind)
    port = free_port()
    command = [sys.executable, "-m", "stagewright.profiler.link_rank"]
    processes = [
        subprocess.Popen(
            command,
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S) for process in processes]
    except subprocess.TimeoutExpired:
        raise MeasurementError("measuring links took too long; is the loopback usable?") from None
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(process.returncode for process in processes):
        raise MeasurementError(f"measuring links failed: {outputs[0][1].strip()[-500:]}")
    found = json.loads(outputs[0][0].strip().splitlines()[-1])
    return Cluster.uniform(
        num_ranks,
        kind=kind,
        latency_s=found["latency_s"],
        bandwidth_bytes_per_s=found["bandwidth_bytes_per_s"],
        all_reduce_bandwidth_bytes_per_s=found["all_reduce_bandwidth_bytes_per_s"],
    )


def free_port() -> int:
    """A TCP port of the loopback address that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fit_line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Latency in seconds and bandwidth in bytes/s from (bytes, seconds) of one-way messages.

    The smallest message gives the latency, the largest the bandwidth beyond it.
    """
    ordered = sorted(points)
    (small, small_s), (large, large_s) = ordered[0], ordered[-1]
    slope = max(large_s - small_s, 1e-9) / (large - small)
    return max(small_s - slope * small, 0.0), 1 / slope
