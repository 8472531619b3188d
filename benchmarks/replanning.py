"""Time planning again after one device of 64 was lost in place, against 100 ms.

    python benchmarks/replanning.py --write docs/evidence/planning-time.md

Layers as in `benchmarks/planner.py` on 8 nodes of 8; a planner that has planned for all of them
plans for the cluster without device 20, once to the end and once with a deadline of 80 ms, as a
plan is costed once more behind it. numba is loaded and machine code read before. Exits with 1 if a
median of the latter takes more than 100 ms, or if its plan is slower than that without the whole
node.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tables import write_between_marks

from planner import BETWEEN, INSIDE, uneven_profile
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.planner.plan import Planner
from stagewright.schedules.numba_jit import load

LIMIT_S, DEADLINE_S = 0.1, 0.08
LOST = 20
CASES = ((48, 32, 1e-4), (100, 32, 1e-4), (100, 32, 1e-2), (100, 80, 1e-4), (200, 32, 1e-4))
"""Layers, gigabytes of a device and the gap."""

HEAD = (
    "| layers | memory of each | gap | plan again, ms | of processor time | before, s | after, s "
    "| without the node, s | with a deadline, ms | step, s |\n" + "|--:" * 10 + "|"
)


class Measured(NamedTuple):
    """Medians of planning again, and the plans.

    Attributes:
        wall_s: Of the search to its end.
        busy_s: Of its processor time.
        cut_s: Of the search with a deadline.
        plans: With all devices, without one, without its node.
        cut: The slowest of the plans that a deadline cut short.
    """

    wall_s: float
    busy_s: float
    cut_s: float
    plans: tuple[Plan, Plan, Plan]
    cut: Plan


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=9, help="medians are shown")
    parser.add_argument("--write", type=Path, help="replace the table in this document")
    arguments = parser.parse_args()
    lines, is_late = [HEAD], False
    load()
    for layers, memory_gb, gap in CASES:
        found = measure(layers, memory_gb, gap, arguments.repeats)
        steps = " | ".join(f"{made.step_time_s:.4f}" for made in found.plans)
        lines.append(
            f"| {layers} | {memory_gb} GB | {gap:g} | {1e3 * found.wall_s:.0f} "
            f"| {1e3 * found.busy_s:.0f} | {steps} "
            f"| {1e3 * found.cut_s:.0f} | {found.cut.step_time_s:.4f} |"
        )
        print(lines[-1], flush=True)
        is_late |= found.cut_s > LIMIT_S or found.cut.step_time_s > found.plans[2].step_time_s
    if arguments.write:
        write_between_marks(arguments.write, "replanning.py", "\n".join(lines))
    return 1 if is_late else 0


def measure(layers: int, memory_gb: int, gap: float, repeats: int) -> Measured:
    """Plan before and after the loss, the first time unmeasured."""
    profile = uneven_profile(layers)
    cluster = Cluster.of_nodes(8, 8, inside=INSIDE, between=BETWEEN, memory_bytes=memory_gb * 10**9)
    options = PlanOptions(num_microbatches=128, max_replicas=None, recompute="auto", gap=gap)
    wall, busy, cut, cut_plans = [], [], [], []
    for _ in range(repeats + 1):
        planner = Planner(profile)
        before = planner.plan(cluster, options)
        began = time.perf_counter(), time.process_time()
        after = planner.plan(cluster.without(LOST), options)
        wall.append(time.perf_counter() - began[0])
        busy.append(time.process_time() - began[1])
        planner = Planner(profile)
        planner.plan(cluster, options)
        began_s = time.perf_counter()
        cut_plans.append(planner.plan(cluster.without(LOST), options, deadline_s=DEADLINE_S))
        cut.append(time.perf_counter() - began_s)
    smaller = planner.plan(cluster.without(*range(16, 24)), options)
    return Measured(
        statistics.median(wall[1:]),
        statistics.median(busy[1:]),
        statistics.median(cut[1:]),
        (before, after, smaller),
        max(cut_plans[1:], key=lambda plan: plan.step_time_s),
    )


if __name__ == "__main__":
    sys.exit(main())
