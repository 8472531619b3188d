"""Ask a running service what schemathesis makes of its OpenAPI document; exit 1 on any failure.

Every route is asked, with data that fits and data that does not, with what earlier answers led to,
and with changed examples (`fuzzing/hooks.py`). The server is a process with a database of its own;
measurements and estimates are made up (`fuzzing/stand_in.py`), so that requests are what takes the
time. Checked of each answer: no 5xx, documented, with the schema, content type and headers that
the document promises; what does not fit is refused with a reason; without the token, nothing; and
none later than its deadline and 2 s. The server's own process never has more than 600 MiB.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.fuzzing.server import DEADLINE_S, Running, served  # noqa: E402
from scripts.limits import Watched  # noqa: E402

FOLDER = Path(__file__).resolve().parent / "fuzzing"
MAX_ROUNDS = 8

DOCUMENTS = ("plans", "profiles", "graphs", "simulations", "profile-jobs", "comparisons")
NOT_ENUMERATED = f"""
[[operations]]
include-name = {json.dumps([f"POST /v1/{name}" for name in DOCUMENTS])}
phases.coverage.enabled = false
"""
"""Bodies with whole documents. Every way to break their schemas is twenty thousand requests."""


def main() -> int:
    """0 if everything held."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000, help="at least so many")
    parser.add_argument("--examples", type=int, default=60, help="a route, a phase and a round")
    parser.add_argument(
        "--quick", action="store_true", help="do not enumerate the schemas of documents"
    )
    parser.add_argument("--phases", default="examples,coverage,fuzzing,stateful")
    parser.add_argument("--seed", type=int, default=None, help="to have the same again")
    parser.add_argument("--log", type=Path, help="where to keep the server's log")
    options = parser.parse_args()
    seed = random.randrange(2**32) if options.seed is None else options.seed
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stagewright-fuzz-") as name:
        folder = Path(name)
        with served(folder) as server:
            counts, failed = fuzz(server, options, seed, folder)
            alive = server.process.poll() is None
        log = server.log.read_text()
        if options.log:
            options.log.write_text(log)
    return report(counts, failed, log, alive, seed, time.monotonic() - begin, server.watched)


def fuzz(
    server: Running, options: argparse.Namespace, seed: int, folder: Path
) -> tuple[Counter[str], bool]:
    """Run rounds until there were enough requests; return how many of each operation, by status."""
    counts: Counter[str] = Counter()
    phases, failed = options.phases, False
    config = folder / "schemathesis.toml"
    common = (FOLDER / "schemathesis.toml").read_text()
    config.write_text(common + NOT_ENUMERATED if options.quick else common)
    for number in range(MAX_ROUNDS):
        counts_file = folder / "counts.json"
        counts_file.unlink(missing_ok=True)
        done = subprocess.run(
            [
                sys.executable, "-m", "schemathesis.cli", "--config-file",
                str(config), "run", f"{server.url}/openapi.json",
                "--header", f"Authorization: Bearer {server.token}", "--phases", phases,
                "--max-examples", str(options.examples), "--seed", str(seed + number),
                "--no-color",
            ],
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "SCHEMATHESIS_HOOKS": str(FOLDER / "hooks.py"),
                "STAGEWRIGHT_FUZZ_COUNTS": str(counts_file),
                "STAGEWRIGHT_FUZZ_DEADLINE_S": str(DEADLINE_S),
            },
        )  # fmt: skip
        if counts_file.exists():
            counts.update(json.loads(counts_file.read_text()))
        failed |= done.returncode != 0
        if failed or counts.total() >= options.requests:
            break
        phases = "fuzzing,stateful"  # the others would send the same again
    return counts, failed or counts.total() < options.requests


def report(
    counts: Counter[str],
    failed: bool,
    log: str,
    alive: bool,
    seed: int,
    took_s: float,
    memory: Watched,
) -> int:
    """Print what was asked and answered; 1 if something did not hold."""
    statuses: Counter[str] = Counter()
    operations: dict[str, Counter[str]] = {}
    for key, number in counts.items():
        label, _, status = key.rpartition(" ")
        statuses[status] += number
        operations.setdefault(label, Counter())[status] += number
    for label, found in sorted(operations.items(), key=lambda entry: entry[0].split()[::-1]):
        told = ", ".join(f"{status}: {number}" for status, number in sorted(found.items()))
        print(f"{label:45} {found.total():6}  {told}")
    broken = sum(number for status, number in statuses.items() if status >= "500")
    print(f"memory: {memory.told()}")
    tracebacks = log.count("Traceback (most recent call last)")
    print(
        f"{counts.total()} requests to {len(operations)} operations in {took_s:.0f} s, "
        f"seed {seed}; {broken} answered 5xx, {tracebacks} tracebacks in the server's log"
    )
    if not alive:
        print("the server ended")
    if statuses["429"]:
        print(f"{statuses['429']} requests were one too many, so they tried nothing")
    wrongs = memory.wrongs()
    for wrong in wrongs:
        print(wrong)
    held = alive and not (failed or broken or tracebacks or statuses["429"] or wrongs)
    return int(not held)


if __name__ == "__main__":
    sys.exit(main())
