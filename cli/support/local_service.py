"""A planning service in a child process on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import StagewrightError

STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class LocalService:
    """Address and token of a running service."""

    url: str
    token: str


@contextlib.contextmanager
def running_service(database: Path) -> Iterator[LocalService]:
    """Start a service on a free loopback port and stop it at the end of the block."""
    # Through the environment: other users of the machine can read a command line.
    token = secrets.token_urlsafe(32)
    command = ["serve", "--port", "0", "--database", str(database)]
    with subprocess.Popen(
        [sys.executable, "-m", "stagewright.cli", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "STAGEWRIGHT_TOKEN": token},
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            # The server prints its address once it accepts connections; no line means it ended.
            first = process.stdout.readline()
            if not first:
                raise StagewrightError(
                    "the service did not start; run 'stagewright serve' to see why"
                )
            yield LocalService(json.loads(first)["url"], token)
        finally:
            process.terminate()
            try:
                process.wait(timeout=STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
