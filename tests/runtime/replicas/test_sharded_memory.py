"""What a replica of a sharded stage holds, measured as resident memory, is what a plan counts."""

import json
import subprocess

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

SLACK, BASE = 0.15, 0.35
"""Of the weights' 134 MB: how far the peak may be off, and what the process takes besides."""


def test_a_sharded_replica_holds_what_is_counted(forking_executable):
    """Whole weights and gradients were counted, which is half as much again with two replicas."""
    words = ["benchmarks/sharded_memory.py", "--json", "--strategies", "fully_shard"]
    done = subprocess.run(
        [forking_executable, *words, "--optimizers", "adam"],
        capture_output=True,
        text=True,
        check=False,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["replicas"] for row in rows] == [2, 4], done.stderr
    for row in rows:
        assert abs(row["peak"] - row["counted"]) < SLACK, row
        # Between steps shards of weights and both moments remain.
        assert row["rest"] < 3 / row["replicas"] + BASE, row
