"""The service, as a process, with stand-ins for what takes long.

Run as ``python -m scripts.fuzzing.server DATABASE``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from scripts.limits import Watched, watched
from stagewright.api.auth import authenticate as guessing
from stagewright.api.http.examples import example_profile
from stagewright.api.server import run
from stagewright.api.settings.settings import ServerSettings

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = Path(__file__).with_name("stand_in.py")
TOKEN = "token-of-this-run"
DEADLINE_S = 10.0
"""For a search; hooks.answered_in_time holds every answer to it, or to the request's own."""

WRONG_AT_ONCE = 10**6
"""Wrong tokens: each route is tried with one, and they all come from one address."""


@dataclass(frozen=True)
class Running:
    """A server that runs.

    Attributes:
        url: Where.
        token: May do everything.
        log: What it says to people.
        watched: Its memory.
        process: Ended by `served`.
    """

    url: str
    token: str
    log: Path
    watched: Watched
    process: subprocess.Popen[str]


@contextmanager
def served(folder: Path) -> Iterator[Running]:
    """Yield a server with a database of its own in a folder."""
    log = folder / "server.log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "scripts.fuzzing.server", str(folder / "fuzz.db")],
            stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        try:
            assert process.stdout is not None
            announced = json.loads(process.stdout.readline() or "{}")
            if "url" not in announced:
                raise SystemExit(f"the server did not start:\n{log.read_text()}")
            with watched(process.pid) as seen:
                yield Running(announced["url"], TOKEN, log, seen, process)
        finally:
            process.terminate()
            process.wait(timeout=30)


def settings(database: str) -> ServerSettings:
    """Of the server as it is, but for measurements and estimates, which are made up."""
    profile = json.dumps(example_profile())
    stand_in = (sys.executable, "-I", "-S", str(STAND_IN))
    return ServerSettings(
        token=TOKEN,
        database=database,
        plan_deadline_s=DEADLINE_S,
        scheduler="threads",
        sandbox="off",
        measure_command=(*stand_in, "profile", profile),
        estimate_command=(*stand_in, "estimate", profile),
    )


if __name__ == "__main__":
    guessing.WRONG_AT_ONCE = WRONG_AT_ONCE
    run(settings(sys.argv[1]), "127.0.0.1", 0)
