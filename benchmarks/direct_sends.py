"""Simulate the gain of sending values past the stages that do not use them.

    python benchmarks/direct_sends.py [--microbatches 16] [--json]

Plans of a U-Net with values relayed and sent straight, on clusters of four and eight devices. The
profile is a measured one (`benchmarks/profiles/unet.json`); the clusters are made up.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stagewright.core.cluster.cluster import Cluster, Device, LinkLevel
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.core.profile.profile import Profile
from stagewright.planner.plan import plan
from stagewright.planner.validation.validate import validate

PROFILE = Path(__file__).parent / "profiles" / "unet.json"
SCHEDULES = ("gpipe", "1f1b", "zero_bubble")
FAST, SLOW = 12e9, 1.25e9
"""Bytes a second: PCIe and ten-gigabit Ethernet."""

LATENCY_S = 1e-5


def clusters() -> dict[str, Cluster]:
    slow = LinkLevel(group_size=4, bandwidth_bytes_per_s=SLOW, latency_s=LATENCY_S)
    fast = slow.model_copy(update={"bandwidth_bytes_per_s": FAST})
    pair = fast.model_copy(update={"group_size": 2})
    eight = slow.model_copy(update={"group_size": 8})
    shared = slow.model_copy(update={"shared": True})
    return {
        "4 devices, 12 GB/s": Cluster(devices=_devices(4), levels=(fast,)),
        "4 devices, 1.25 GB/s": Cluster(devices=_devices(4), levels=(slow,)),
        "2 nodes of 2, 1.25 GB/s a node": Cluster(devices=_devices(4), levels=(pair, shared)),
        "8 devices, 1.25 GB/s": Cluster(devices=_devices(8), levels=(eight,)),
    }


def _devices(count: int) -> tuple[Device, ...]:
    return tuple(Device(name=f"gpu:{index}", kind="gpu") for index in range(count))


def rows(profile: Profile, num_microbatches: int) -> Iterator[dict[str, Any]]:
    """One for each cluster and schedule."""
    for name, cluster in clusters().items():
        for schedule in SCHEDULES:
            relayed, straight = (
                _planned(profile, cluster, schedule, num_microbatches, skips)
                for skips in ("relay", "direct")
            )
            yield {
                "cluster": name,
                "schedule": schedule,
                "relayed_step_s": relayed.step_time_s,
                "direct_step_s": straight.step_time_s,
                "gain": relayed.step_time_s / straight.step_time_s - 1,
                "relayed_hops_bytes": _hops(relayed),
                "direct_hops_bytes": _hops(straight),
                "past_stages_bytes": {
                    f"{send.source}-{send.target}": send.forward_bytes
                    for send in straight.direct_sends
                },
            }


def _planned(
    profile: Profile, cluster: Cluster, schedule: Any, num_microbatches: int, skips: Any
) -> Plan:
    options = PlanOptions(
        schedule=schedule,
        num_microbatches=num_microbatches,
        num_stages=len(cluster.devices),
        skips=skips,
    )
    made = plan(profile, cluster, options)
    validate(made, profile, cluster)
    return made


def _hops(made: Plan) -> list[int]:
    """Activations over each cut, per micro-batch."""
    return [stage.send_forward_bytes for stage in made.stages[:-1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--json", action="store_true", help="one object a line")
    asked = parser.parse_args()
    for row in rows(Profile.read(PROFILE), asked.microbatches):
        if asked.json:
            print(json.dumps(row))
            continue
        print(
            f"{row['cluster']}, {row['schedule']}: {row['relayed_step_s'] * 1e3:.1f} ms relayed, "
            f"{row['direct_step_s'] * 1e3:.1f} ms sent straight ({row['gain']:+.1%})"
        )
        print(f"  bytes over each cut: {row['relayed_hops_bytes']} relayed")
        print(f"  {row['direct_hops_bytes']}, past stages {row['past_stages_bytes']}")


if __name__ == "__main__":
    main()
