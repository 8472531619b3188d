"""Start the planning service as a process of its own."""

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
class Service:
    """Where a running service is, and the token it wants."""

    url: str
    token: str


@contextlib.contextmanager
def running_service(database: Path) -> Iterator[Service]:
    """A service on a free loopback port, stopped at the end of the block.

    Raises:
        StagewrightError: It did not start.
    """
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
            first = process.stdout.readline()
            if not first:
                raise StagewrightError("the service did not start; try 'stagewright serve'")
            yield Service(json.loads(first)["url"], token)
        finally:
            process.terminate()
            try:
                process.wait(timeout=STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
