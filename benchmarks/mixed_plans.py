"""Plans that mix pipelines, split layers, replicas and shards against the unsplit model.

Five models in double precision under 20 plans each, on up to four gloo ranks: three steps with
clipping, and the third again from a checkpoint that another plan saved. Prints the largest
differences of losses, norms and weights; exits 1 if any is above 1e-12.

    python benchmarks/mixed_plans.py --write docs/evidence/split-layers.md
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from tables import markdown_table, write_between_marks

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.runtime.tensor_parallel.models import MAKERS  # noqa: E402
from tests.runtime.tensor_parallel.plans import MIXES  # noqa: E402

EXACT = 1e-12


def run_model(name: str) -> list[dict[str, float]]:
    """Return what the ranks found under all plans of a model."""
    with tempfile.TemporaryDirectory() as folder:
        asked = json.dumps({"cases": {name: MIXES}, "folder": folder})
        done = subprocess.run(
            [sys.executable, "-m", "tests.runtime.tensor_parallel.worker", asked],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        sys.exit(f"{name}: {done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=list(MAKERS), action="append")
    parser.add_argument("--write", type=Path, help="a page to put the table into")
    given = parser.parse_args()
    rows, worst = [], 0.0
    for name in given.model or MAKERS:
        largest: dict[str, float] = defaultdict(float)
        runs = set()
        for found in run_model(name):
            runs.add((found["mix"], found["begin"]))
            for key in ("loss", "norm", "weight"):
                largest[key] = max(largest[key], found[key])
        worst = max(worst, *largest.values())
        plans = len({mix for mix, _ in runs})
        cells = [f"{largest[key]:.0e}" for key in ("loss", "norm", "weight")]
        rows.append((name, str(plans), str(len(runs) - plans), *cells))
        print(*rows[-1], flush=True)
    head = ("model", "plans", "resumed under another", "loss", "norm", "weights")
    text = markdown_table(head, rows, left=1)
    print(text)
    if given.write:
        write_between_marks(given.write, "mixed_plans.py", text)
    return int(worst > EXACT)


if __name__ == "__main__":
    sys.exit(main())
