"""Eight plans by name on eight clusters: before and after the command's choices.

Before: `1f1b`, as many micro-batches as devices and at least eight, all of the memory. After: what
`stagewright plan NAME --devices CLUSTER` chooses. Exits 1 if a choice takes more time for a sample
than before, or leaves less than a twentieth of the memory free.

    python benchmarks/defaults.py --write docs/evidence/defaults.md
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tables import markdown_table, write_between_marks

from stagewright.cli.support.named_models import EstimateFlags
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.planner.plan import plan

CASES = (
    ("gpt2-xl", "4x24GB"),
    ("gpt2-large", "8xL4"),
    ("bert-large", "2xRTX4090"),
    ("t5-large", "4xA100-40GB"),
    ("vit-large", "8xV100"),
    ("resnet152", "4xL4"),
    ("llama-7b", "8xA100-80GB"),
    ("llama-70b", "4x8xH100"),
)


@dataclass(frozen=True)
class Found:
    """One plan, in the numbers compared."""

    schedule: str
    microbatches: int
    bubble: float
    sample_s: float
    free: float

    @classmethod
    def of(cls, made: Plan, cluster: Cluster) -> Found:
        """Read them from a plan; memory is free on the fullest device."""
        held: dict[str, int] = {}
        for stage in made.stages:
            for name in stage.devices:
                held[name] = held.get(name, 0) + stage.memory.total_bytes
        free = min(
            1 - held.get(device.name, 0) / device.memory_bytes
            for device in cluster.devices
            if device.memory_bytes
        )
        return cls(
            made.schedule,
            made.num_microbatches,
            made.bubble_fraction,
            made.step_time_s / made.num_microbatches,
            free,
        )


LEAST_FREE = 0.05
"""Share of the fullest device that is left to its context, to buffers and to fragments."""


def compare(name: str, devices: str) -> tuple[Found, Found]:
    """Return the plan of a case before and after."""
    given = Cluster.parse(devices)
    estimated = EstimateFlags().estimate(name, given, devices)
    profile, cluster = estimated.profile, estimated.cluster
    count = max(8, len(cluster.devices))
    old = plan(profile, cluster, PlanOptions(num_microbatches=count, recompute="auto"))
    options = PlanOptions(recompute="auto")
    new = plan(profile, cluster, options, schedule="auto", chunks="auto", num_microbatches="auto")
    return Found.of(old, cluster), Found.of(new, cluster)


def main() -> int:
    """Compare all cases, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table into FILE")
    arguments = parser.parse_args()
    head = ("model", "devices", "", "schedule", "micro-batches", "bubble", "time a sample", "free")
    rows: list[tuple[str, ...]] = []
    failed = False
    for name, devices in CASES:
        began = time.monotonic()
        old, new = compare(name, devices)
        failed |= new.sample_s > old.sample_s * 1.001 or new.free < LEAST_FREE
        for when, found in (("before", old), ("after", new)):
            row = (
                *((name, devices) if when == "before" else ("", "")),
                when,
                found.schedule,
                str(found.microbatches),
                f"{found.bubble:.1%}",
                f"{found.sample_s * 1e3:.1f} ms",
                f"{found.free:.0%}",
            )
            rows.append(row)
            print(" | ".join(row), flush=True)
        print(f"{time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    if arguments.write:
        write_between_marks(arguments.write, "defaults.py", markdown_table(head, rows, left=4))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
