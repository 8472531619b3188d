"""Time the simulator for one step, including its order of work.

    python benchmarks/simulate.py [--json PATH] [--repeats N]

Exits 1 if 64 stages x 512 micro-batches of any schedule take 5 ms or more with numba.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

from stagewright.core.plan.schedule import ScheduleName
from stagewright.planner.simulator.simulate import StageTimes, step_time
from stagewright.schedules import numba_jit as jit

LIMIT_MS = 5.0
LIMITED = (64, 512)
"""Stages and micro-batches of the steps that are held to the limit."""


class Case(NamedTuple):
    """One step; replicas are those of every stage, chunks the stages a rank."""

    schedule: ScheduleName
    stages: int
    microbatches: int
    replicas: int = 1
    chunks: int = 1


CASES = (
    Case("1f1b", 64, 512),
    Case("gpipe", 64, 512),
    Case("zero_bubble", 64, 512),
    Case("interleaved_1f1b", 64, 512, chunks=4),
    Case("looped_bfs", 64, 512, chunks=4),
    Case("interleaved_zero_bubble", 64, 512, chunks=2),
    Case("zbv", 64, 512, chunks=2),
    Case("dualpipev", 64, 512, chunks=2),
    Case("1f1b", 64, 4096, replicas=64),
    Case("1f1b", 8, 32),
)


def median_ms(case: Case, repeats: int) -> float:
    """Of one call of `step_time`, after one that is not counted."""
    stages = range(case.stages)
    times = StageTimes(
        [1 + 0.01 * (stage % 7) for stage in stages],
        [2 + 0.01 * (stage % 5) for stage in stages],
        [0.05] * (case.stages - 1),
        [0.05] * (case.stages - 1),
    )
    taken_s = []
    for _ in range(repeats + 1):
        begin_s = time.perf_counter()
        step_time(
            case.schedule, times, case.microbatches, (case.replicas,) * case.stages, (), case.chunks
        )
        taken_s.append(time.perf_counter() - begin_s)
    return 1e3 * statistics.median(taken_s[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description="How long one simulated step takes.")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--repeats", type=int, default=50)
    arguments = parser.parse_args()
    os.environ["STAGEWRIGHT_NUMBA"] = "0"
    plain = [median_ms(case, max(3, arguments.repeats // 10)) for case in CASES]
    del os.environ["STAGEWRIGHT_NUMBA"]
    compiled: list[float | None] = [None] * len(CASES)
    if jit.is_available():
        import numba  # noqa: F401 - once it is there, the simulator uses it

        compiled = [median_ms(case, arguments.repeats) for case in CASES]
    print(f"{'schedule':<24}{'stages':>7}{'micro-batches':>15}{'replicas':>10}{'chunks':>8}"
          f"{'Python':>12}{'numba':>12}")  # fmt: skip
    rows = []
    for case, plain_ms, numba_ms in zip(CASES, plain, compiled, strict=True):
        with_numba = "-" if numba_ms is None else f"{numba_ms:.2f} ms"
        print(f"{case.schedule:<24}{case.stages:>7}{case.microbatches:>15}{case.replicas:>10}"
              f"{case.chunks:>8}{plain_ms:>9.2f} ms{with_numba:>12}")  # fmt: skip
        rows.append({**case._asdict(), "plain_ms": plain_ms, "numba_ms": numba_ms})
    if arguments.json:
        machine = {"machine": platform.machine(), "python": platform.python_version()}
        arguments.json.write_text(json.dumps({**machine, "rows": rows}, indent=2) + "\n")
    limited = zip(CASES, compiled, strict=True)
    slow = [
        f"{case.schedule} takes {taken_ms:.2f} ms"
        for case, taken_ms in limited
        if taken_ms is not None
        and (case.stages, case.microbatches) == LIMITED
        and taken_ms >= LIMIT_MS
    ]
    print(*slow, sep="\n", end="\n" if slow else "", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
