"""Start the planning service as a process of its own, and post to it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import InvalidInput, StagewrightError

STOP_TIMEOUT_S = 10.0

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""The service is on this machine; a proxy of the environment could not reach it."""


@dataclass(frozen=True)
class Service:
    """Where a running service is, and the token it wants."""

    url: str
    token: str

    def post(self, path: str, body: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Post JSON and return the JSON answer.

        Raises:
            InvalidInput: The service refused the request; the message is its own.
            StagewrightError: It failed.
        """
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode(),
            headers={
                "Authorization": f"Bearer {self.token}",
                "Content-Type": "application/json",
            },
        )
        try:
            with _DIRECT.open(request, timeout=timeout_s) as response:
                answer: dict[str, Any] = json.load(response)
                return answer
        except urllib.error.HTTPError as error:
            problem = json.load(error)
            kind = InvalidInput if error.code < 500 else StagewrightError
            raise kind(f"the service answered {error.code}: {problem.get('detail')}") from None


@contextlib.contextmanager
def running_service(database: Path) -> Iterator[Service]:
    """A service on a free loopback port, stopped at the end of the block.

    Raises:
        StagewrightError: It did not start.
    """
    command = ["serve", "--port", "0", "--database", str(database)]
    with subprocess.Popen(
        [sys.executable, "-m", "stagewright.cli", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            if not first:
                raise StagewrightError("the service did not start; try 'stagewright serve'")
            yield Service(**json.loads(first))
        finally:
            process.terminate()
            try:
                process.wait(timeout=STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
