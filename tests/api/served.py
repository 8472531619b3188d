"""The service as it is served: a process with its default settings and a database in a file."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagewright.api.http.examples import example_profile

TOKEN = "a-token-for-what-is-served"
LONG_S = 120.0
"""Nothing here takes as long; machines that run tests are busy."""


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    headers: dict[str, str]

    def json(self) -> Any:
        return json.loads(self.body)

    def told(self) -> str:
        """Return the reason of a refusal."""
        return str(self.json()["detail"])


@dataclass(frozen=True)
class Served:
    """A server's process and its port."""

    process: subprocess.Popen[str]
    port: int
    database: Path

    def ask(
        self, method: str, path: str, body: Any = None, *, token: str = TOKEN, **headers: str
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LONG_S)
        sent = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request(method, path, data, sent)
            answer = connection.getresponse()
            told = {name.lower(): value for name, value in answer.getheaders()}
            return Answer(answer.status, answer.read(), told)
        finally:
            connection.close()

    def plan(self, *, token: str = TOKEN, **changes: Any) -> Answer:
        """Plan the example; changes are fields of the request."""
        body = {"profile": example_profile(), "cluster": "2x24GB", **changes}
        return self.ask("POST", "/v1/plans", body, token=token)

    def key_of_project(self, name: str, *scopes: str) -> str:
        """Return a key of a new project."""
        project = self.ask("POST", "/v1/projects", {"name": name}).json()["id"]
        wanted = {"name": name, "project_id": project, "scopes": scopes}
        return str(self.ask("POST", "/v1/api-keys", wanted).json()["secret"])

    @property
    def memory_mib(self) -> int:
        return self._memory("VmRSS")

    @property
    def peak_mib(self) -> int:
        return self._memory("VmHWM")

    def forget_peak(self) -> None:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")

    @property
    def processor_s(self) -> float:
        """Return the processor time of the server's own process."""
        numbers = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return sum(map(int, numbers[11:13])) / os.sysconf("SC_CLK_TCK")

    def _memory(self, name: str) -> int:
        found = re.search(rf"{name}:\s+(\d+)", Path(f"/proc/{self.process.pid}/status").read_text())
        assert found is not None
        return int(found[1]) >> 10


@contextmanager
def served(folder: Path, **environment: str) -> Iterator[Served]:
    """Yield a server that has just been started, whether or not it is ready."""
    database = folder / "served.db"
    command = [sys.executable, "-P", "-m", "stagewright.api", "--port", "0"]
    with (folder / "served.log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--database", str(database)],
            env={**os.environ, "STAGEWRIGHT_TOKEN": TOKEN, "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            assert process.stdout is not None
            with process.stdout:
                url = json.loads(process.stdout.readline())["url"]
            yield Served(process, int(url.rpartition(":")[2]), database)
        finally:
            process.kill()
            process.wait()


def wait_until_ready(server: Served) -> None:
    until_s = time.monotonic() + LONG_S
    while server.ask("GET", "/readyz").status != 200:
        assert time.monotonic() < until_s, "the server does not become ready"
        time.sleep(0.1)
