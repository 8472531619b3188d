"""Show the gap of the printed step, and the processor time to plan, on realistic problems.

    python benchmarks/step_gap.py

The seven measured models of `gains.py` on 4 and 8 devices, three links, without and with a limit on
memory, one device a stage and any number with recomputation: 168 problems. The gap is the plan's
simulated step over the printed bound on that of all plans. Exits with 1 if the median is above 3 %,
or any problem's gap above 10 %.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from gains import DEVICES, LINKS, MICROBATCHES, Link, read_or_measure, tight_memory

from stagewright.core.plan.plan import PlanOptions
from stagewright.core.profile.profile import Profile
from stagewright.planner.problem.problem import PlanningRequest
from stagewright.planner.solvers.solve import solve

MEDIAN, WORST = 0.03, 0.10
"""Gaps allowed."""


def problems(
    profiles: dict[str, Profile], links: tuple[Link, ...]
) -> Iterator[tuple[str, PlanningRequest]]:
    """Yield every problem with its name."""
    for link in links:
        for name, profile in profiles.items():
            for count in DEVICES:
                for memory_bytes in (None, tight_memory(profile, count, link)):
                    for is_free in (False, True):
                        asked = {"max_replicas": None, "recompute": "auto"} if is_free else {}
                        options = PlanOptions(num_microbatches=MICROBATCHES, **asked)
                        yield (
                            f"{name}, {count} devices, {link.name}"
                            f"{', short memory' * bool(memory_bytes)}{', free' * is_free}",
                            PlanningRequest(profile, link.cluster(count, memory_bytes), options),
                        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--profiles", type=Path, default=Path(__file__).parent / "profiles")
    parser.add_argument("--links", type=int, default=len(LINKS), help="only the slowest so many")
    arguments = parser.parse_args()
    gaps, took_s = [], []
    for name, request in problems(read_or_measure(arguments.profiles), LINKS[: arguments.links]):
        began = time.process_time()
        found = solve(request)
        took_s.append(time.process_time() - began)
        gaps.append(found.costed.step_time_s / found.simulated_bound_s - 1)
        if gaps[-1] > 1e-9 or took_s[-1] > 0.5:
            print(f"{name}: gap {gaps[-1]:.2%}, {took_s[-1]:.2f} s", flush=True)
    closed = sum(gap <= 1e-9 for gap in gaps)
    print(
        f"{len(gaps)} problems: gap closed in {closed}, median {statistics.median(gaps):.2%}, "
        f"largest {max(gaps):.2%}; processor time {statistics.median(took_s):.3f} s in the "
        f"median, {max(took_s):.2f} s at most, {sum(took_s):.1f} s in all"
    )
    return 1 if statistics.median(gaps) > MEDIAN or max(gaps) > WORST else 0


if __name__ == "__main__":
    sys.exit(main())
