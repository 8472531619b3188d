"""Time planning again after one device of 64 was lost in place, against 100 ms.

    python benchmarks/replanning.py --write docs/evidence/planning-time.md

Layers as in `benchmarks/planner.py` on 8 nodes of 8; a planner that has planned for all of them
plans for the cluster without device 20. numba is loaded and machine code read before. Exits with 1
if a median is late.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

from tables import write_between_marks

from planner import BETWEEN, INSIDE, uneven_profile
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.planner.plan import Planner
from stagewright.schedules.numba_jit import LARGE_STEPS, load_if_worthwhile

LIMIT_S = 0.1
LOST = 20
CASES = ((48, 32, 1e-4), (100, 32, 1e-4), (100, 32, 1e-2), (100, 80, 1e-4), (200, 32, 1e-4))
"""Layers, gigabytes of a device and the gap."""

HEAD = (
    "| layers | memory of each | gap | plan again, ms | of processor time | before, s | after, s "
    "| without the node, s |\n|--:|--:|--:|--:|--:|--:|--:|--:|"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=9, help="medians are shown")
    parser.add_argument("--write", type=Path, help="replace the table in this document")
    arguments = parser.parse_args()
    lines, is_late = [HEAD], False
    load_if_worthwhile(LARGE_STEPS)
    for layers, memory_gb, gap in CASES:
        wall, busy, plans = measure(layers, memory_gb, gap, arguments.repeats)
        steps = " | ".join(f"{made.step_time_s:.4f}" for made in plans)
        lines.append(
            f"| {layers} | {memory_gb} GB | {gap:g} | {1e3 * wall:.0f} | {1e3 * busy:.0f} "
            f"| {steps} |"
        )
        print(lines[-1], flush=True)
        is_late |= wall > LIMIT_S
    if arguments.write:
        write_between_marks(arguments.write, "replanning.py", "\n".join(lines))
    return 1 if is_late else 0


def measure(
    layers: int, memory_gb: int, gap: float, repeats: int
) -> tuple[float, float, tuple[Plan, Plan, Plan]]:
    """Return the medians of time and processor time, and the plans with and without devices."""
    profile = uneven_profile(layers)
    cluster = Cluster.of_nodes(8, 8, inside=INSIDE, between=BETWEEN, memory_bytes=memory_gb * 10**9)
    options = PlanOptions(num_microbatches=128, max_replicas=None, recompute="auto", gap=gap)
    wall, busy = [], []
    for _ in range(repeats + 1):
        planner = Planner(profile)
        before = planner.plan(cluster, options)
        began = time.perf_counter(), time.process_time()
        after = planner.plan(cluster.without(LOST), options)
        wall.append(time.perf_counter() - began[0])
        busy.append(time.process_time() - began[1])
    smaller = planner.plan(cluster.without(*range(16, 24)), options)
    return statistics.median(wall[1:]), statistics.median(busy[1:]), (before, after, smaller)


if __name__ == "__main__":
    sys.exit(main())
