"""Measures nothing: after a short while of its own writes a profile that names the request.

Run with the standard library alone: ``python -I -S stand_in.py FOLDER``. The folder has the
profile to answer with, and gets a line for every run and another for its end.
"""

import json
import os
import random
import sys
import time
from pathlib import Path


def main(folder: Path) -> None:
    request = json.load(sys.stdin)
    seed = request["sample"]["seed"]
    _note(folder, f"began {seed} {os.getpid()}")
    profile = json.loads((folder / "profile.json").read_text())
    profile["notes"] = [f"for seed {seed}"]
    for done in range(4):
        line = json.dumps({"done": done, "total": 4, "layer": f"blocks.{done}"})
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
        time.sleep(random.uniform(0.0, 0.3))
    _note(folder, f"ended {seed} {os.getpid()}")
    sys.stdout.write(json.dumps(profile))


def _note(folder: Path, line: str) -> None:
    """One write, so that lines of several processes do not mix."""
    with (folder / "runs").open("ab", buffering=0) as runs:
        runs.write(line.encode() + b"\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
