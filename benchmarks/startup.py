"""Time the start: ``--help`` and ``import stagewright``.

Prints medians of fresh processes; exits 1 when ``--help`` takes half a second or torch is imported.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

HELP_LIMIT_S = 0.5
REPEATS = 9

COMMANDS = {
    "python": ["-c", "pass"],
    "import stagewright": ["-c", "import stagewright"],
    "stagewright --help": ["-m", "stagewright.cli", "--help"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    found = {name: median_time_s(command) for name, command in COMMANDS.items()}
    torch_imported = imports_torch()
    if as_json:
        print(json.dumps({"median_s": found, "imports_torch": torch_imported}))
    else:
        for name, time_s in found.items():
            print(f"{name:20} {time_s * 1e3:6.0f} ms")
        print(f"import stagewright {'imports' if torch_imported else 'does not import'} torch")
    return int(found["stagewright --help"] >= HELP_LIMIT_S or torch_imported)


def median_time_s(command: list[str]) -> float:
    """Median wall time of a fresh interpreter, after one run that warms the disk's cache."""
    times_s = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
        times_s.append(time.perf_counter() - start)
    return statistics.median(times_s[1:])


def imports_torch() -> bool:
    """Return True if Python's import trace of ``import stagewright`` names torch."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import stagewright"],
        check=True,
        capture_output=True,
        text=True,
    )
    names = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
    return any(name.split(".")[0] == "torch" for name in names)


if __name__ == "__main__":
    sys.exit(main())
