"""Ranks killed with ``kill -9`` at random moments: what is said, what is lost, and what is left.

Three ways. Ranks alone: each rank in turn is killed, the others have to name it and what they were
at, within the timeout, and to end. Under torchrun: each rank in turn is killed, and the elastic
example has to go on from the last checkpoint. Several launchers: whole launchers are killed with
their rank, and those left have to plan for one device less. Each time the last checkpoint has to
load, and no process may be left. Exits 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a killed rank makes pages of traces

import torch

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))  # for the example, which is no part of the package

from benchmarks.killed_launched import kill_ranks, lose_launchers  # noqa: E402
from benchmarks.killed_ranks import kill_one, made_up_profile  # noqa: E402

WAYS = ("ranks", "torchrun", "launchers")


def main() -> int:
    given = _arguments()
    random.seed(given.seed)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to stop"))  # so that nothing is left
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder, profile = Path(name), made_up_profile()
        file = folder / "profile.json"
        profile.write(file)
        # Ranks alone are forked, so they come before this process has any thread.
        if "ranks" in given.ways:
            for number in range(given.times):
                place = folder / f"ranks-{number}"
                rows += [_shown(kill_one(number, given.ranks, place, profile, given.timeout))]
        if "torchrun" in given.ways:
            rows += map(
                _shown,
                kill_ranks(given.times, given.ranks, folder / "run", file, given.timeout),
            )
        if "launchers" in given.ways:
            rows += map(_shown, lose_launchers(given.ranks, folder / "nodes", file, given.timeout))
    if given.json:
        print(json.dumps({"seed": given.seed, "ranks": given.ranks, "rows": rows}, indent=2))
    wrong = sum(bool(row["violations"]) for row in rows)
    print(f"{len(rows)} kills, {wrong} of them with a violation", file=sys.stderr)
    return 1 if wrong else 0


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as one line, at once, since all of them take minutes."""
    print(
        f"{row['way']:28} rank {row['victim']} after {row['after_s']:5.2f} s  over in "
        f"{row['ended_s']:6.2f} s  checkpoint {row['checkpoint']!s:>6}  {row['said'][:150]}",
        *(f"\n    VIOLATION: {what}" for what in row["violations"]),
        file=sys.stderr,
        flush=True,
    )
    return row


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=20, help="kills, of each of the first two")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
