"""Time what a first user waits for: plans by name, cache empty and filled, and explain.

Each command runs in a process of its own, with stderr no terminal. Limits are of processor time,
which other work on the machine hardly changes. "Silent" is the longest time without a line. Exits 1
if a command takes longer, or is silent for more than three seconds.

    python benchmarks/first_contact.py --write docs/evidence/first-contact.md
"""

from __future__ import annotations

import argparse
import os
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tables import markdown_table, write_between_marks

SILENT_S = 3.0
ESTIMATE_S = 2.0
"""CPU seconds allowed for an estimate that is kept."""

CASES = (
    ("gpt2-xl", "4x24GB", "RTX4090", 10.0, 2.0),
    ("llama-70b", "4x8xH100", "H100", 40.0, None),
)
"""Model, devices, the device estimated, and the CPU seconds allowed, cache cold and warm.

A warm plan has no limit where the search itself takes longer: it is not kept.
"""


class Run(NamedTuple):
    """One run of a command: seconds on the clock and of the processor, and the longest silence."""

    clock_s: float
    cpu_s: float
    silent_s: float


def run(folder: Path, *words: str) -> Run:
    """Run a command and measure it."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    began = last = time.monotonic()
    silent = 0.0
    with subprocess.Popen(
        (sys.executable, "-m", "stagewright.cli", *words),
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stderr is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stderr, selectors.EVENT_READ)
            while selector.select() and os.read(process.stderr.fileno(), 65536):
                now = time.monotonic()
                silent, last = max(silent, now - last), now
        _, status, usage = os.wait4(process.pid, 0)  # its own children's time included
        process.returncode = os.waitstatus_to_exitcode(status)
    now = time.monotonic()
    if process.returncode:
        raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}")
    return Run(now - began, usage.ru_utime + usage.ru_stime, max(silent, now - last))


def measure(
    name: str, devices: str, device: str, cold_s: float, warm_s: float | None, repeats: int
) -> list[tuple[str, Run, float | None]]:
    """Return command, medians (of silence the longest) and limit of a case."""
    found: dict[str, list[Run]] = {}
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as path:
            folder = Path(path)
            plan = ("plan", name, "-d", devices, "-o", "plan.json")
            estimate = ("estimate", name, "--device", device, "-o", "profile.json")
            explain = ("explain", "plan.json")
            for what, words in (
                (f"plan {name}, cold", plan),
                (f"plan {name}, warm", plan),
                (f"estimate {name}, after the plan", estimate),
                (f"explain {name}", explain),
            ):
                found.setdefault(what, []).append(run(folder, *words))
    limits = (cold_s, warm_s, ESTIMATE_S, None)
    return [
        (
            what,
            Run(
                statistics.median(each.clock_s for each in runs),
                statistics.median(each.cpu_s for each in runs),
                max(each.silent_s for each in runs),
            ),
            limit,
        )
        for (what, runs), limit in zip(found.items(), limits, strict=True)
    ]


def main() -> int:
    """Measure all cases, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="of each command")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table into FILE")
    arguments = parser.parse_args()
    rows = []
    missed = False
    for case in CASES:
        for what, found, limit in measure(*case, arguments.repeats):
            is_late = (limit is not None and found.cpu_s > limit) or found.silent_s > SILENT_S
            missed |= is_late
            asked = "" if limit is None else f"{limit:.0f} s"
            times = [f"{seconds:.1f} s" for seconds in found]
            rows.append((what, *times[:2], asked, times[2], "**no**" if is_late else "yes"))
            print(" | ".join(rows[-1]), flush=True)
    if arguments.write:
        head = ("command", "time", "CPU", "limit of CPU", "silent, at most", "kept")
        write_between_marks(arguments.write, "first_contact.py", markdown_table(head, rows))
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
