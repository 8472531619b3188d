"""Compare the demo's predicted step times with the measured ones.

Runs ``stagewright demo`` several times and exits 1 when the median error of a model exceeds
25 %. Needs a quiet machine: whatever else runs is measured too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass

MEDIAN_ERROR_LIMIT = 0.25


@dataclass(frozen=True)
class Prediction:
    """One model in one run of the demo."""

    model: str
    run: int
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Relative to the measured time; negative where less was predicted."""
        return (self.predicted_s - self.measured_s) / self.measured_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--models", default="gpt2,resnet50", help="as for stagewright demo")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.runs < 1:
        parser.error("--runs must be at least 1")
    found = []
    for run in range(1, given.runs + 1):
        for prediction in demo(given.models, run):
            found.append(prediction)
            print(row(prediction), file=sys.stderr if given.json else sys.stdout, flush=True)
    medians = median_errors(found)
    if given.json:
        runs = [{**asdict(prediction), "error": prediction.error} for prediction in found]
        print(json.dumps({"runs": runs, "median_error": medians}))
    else:
        for model, error in medians.items():
            print(f"{model:16}  median error {error:.1%}, at most {MEDIAN_ERROR_LIMIT:.0%} allowed")
    return int(any(error > MEDIAN_ERROR_LIMIT for error in medians.values()))


def demo(models: str, run: int) -> list[Prediction]:
    """One run of the demo; its talk goes to stderr."""
    command = [sys.executable, "-m", "stagewright.cli", "demo", "--json", "--models", models]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([*command, "-o", folder], check=True, stdout=subprocess.PIPE)
    return [
        Prediction(entry["model"], run, entry["predicted_step_s"], entry["measured_step_s"])
        for entry in json.loads(done.stdout)
    ]


def row(found: Prediction) -> str:
    return (
        f"{found.model:16}  run {found.run}  predicted {found.predicted_s:.3f} s  "
        f"measured {found.measured_s:.3f} s  error {found.error:+.1%}"
    )


def median_errors(found: list[Prediction]) -> dict[str, float]:
    """Return the median absolute error of each model."""
    return {
        model: statistics.median(abs(entry.error) for entry in found if entry.model == model)
        for model in dict.fromkeys(entry.model for entry in found)
    }


if __name__ == "__main__":
    sys.exit(main())
