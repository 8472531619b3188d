"""The service as a process that may be killed, with a stand-in for what measures.

Run as ``python -m scripts.chaos.server DATABASE PORT FOLDER``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from stagewright.api.server import run
from stagewright.api.settings.settings import ServerSettings

TOKEN = "token-of-this-run"
STAND_IN = Path(__file__).with_name("stand_in.py")
SILENCE_S = 5.0
"""A worker beats every two seconds."""


def main(database: str, port: str, folder: str) -> None:
    """Serve until killed."""
    settings = ServerSettings(
        token=TOKEN,
        database=database,
        job_silence_s=SILENCE_S,
        job_attempts=20,
        sandbox="off",
        measure_command=(sys.executable, "-I", "-S", str(STAND_IN), folder),
    )
    run(settings, "127.0.0.1", int(port))


if __name__ == "__main__":
    main(*sys.argv[1:])
