"""Leave the planner's compiled loops in numba's cache; run beside the first tests of a suite.

Each worker that comes to need them would otherwise compile them for itself, half a minute long.
"""

from __future__ import annotations

import importlib

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.plan.plan import PlanOptions
from stagewright.planner.plan import plan
from stagewright.schedules import numba_jit as jit
from tests.builders import random_profile

ASKED = (
    {"max_replicas": None, "num_microbatches": 16},
    {"schedule": "zero_bubble", "num_microbatches": 8},
)


def main() -> None:
    """Nothing where there is no numba; a second where all is compiled already."""
    if not jit.is_available():
        return
    importlib.import_module("numba")
    for asked in ASKED:
        profile = random_profile(27, 30, ties=0)
        plan(profile, Cluster.uniform(8, memory_bytes=10**7), PlanOptions(**asked))


if __name__ == "__main__":
    main()
