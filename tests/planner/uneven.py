"""The uneven layers of `benchmarks/planner.py`, and nodes of eight devices as planned there."""

import runpy
from pathlib import Path

from stagewright.core.cluster.cluster import Cluster

# By its path: a module of the name `planner` would be the package of that folder, too.
_BENCHMARK = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "planner.py"))

uneven_profile = _BENCHMARK["uneven_profile"]


def nodes(count, memory_gb):
    """A cluster of so many nodes, each device with so many gigabytes."""
    inside, between = _BENCHMARK["INSIDE"], _BENCHMARK["BETWEEN"]
    return Cluster.of_nodes(
        count, 8, inside=inside, between=between, memory_bytes=memory_gb * 10**9
    )
