"""The benchmark of stages that sleep runs, and no step is faster than the sleeps it is made of."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "emulated.py"


def test_every_schedule_takes_at_least_as_long_as_simulated() -> None:
    command = [sys.executable, str(BENCHMARK), "--json", "--ranks", "2", "--steps", "1"]
    done = subprocess.run(
        [*command, "--forward-ms", "8"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    rows = json.loads(done.stdout)
    assert len(rows) == 10
    for row in rows:
        assert row["measured_s"] >= row["predicted_s"] * (1 - 1e-6), row
