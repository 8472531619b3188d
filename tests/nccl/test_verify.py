"""One rank of a job verifies a plan, in which no other rank takes part.

`verify` has all ranks in one process, so what can fail here is a batch that is not moved to the
device, and a meeting with ranks that do not come.
"""

import json

import pytest

from tests.runtime.forked import run_as_on_nccl

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

VARIANTS = [
    {"model": "mlp", "schedule": "1f1b", "stages": 3},
    {"model": "mlp", "schedule": "interleaved_1f1b", "stages": 6, "chunks": 2},
    {"model": "mlp", "schedule": "zero_bubble", "stages": 3, "recompute": "always"},
    {"model": "resnet", "schedule": "1f1b", "stages": 2, "replicas": [2, 1]},
]  # fmt: skip


def test_verify_moves_its_batch_and_waits_for_no_rank(forking_executable):
    """The other rank is at a barrier all the while, where a launch of its own would meet none."""
    printed = run_as_on_nccl(
        forking_executable, "tests.nccl.verify_worker", json.dumps(VARIANTS), timeout_s=60
    )
    told = [json.loads(line) for line in printed.splitlines()]
    assert len(told) == len(VARIANTS)
    for found in told:
        assert found["worst"] <= 1e-9
        assert found["launches"] == found["synchronises"] == 0
