"""The service as a process of its own: its first line, its end, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from stagewright.api.http.examples import measure_example
from stagewright.api.server import is_loopback, serve
from stagewright.core.errors import InvalidInput, Refused

MODULE = ("-m", "stagewright.api")
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Running:
    """A server's process, and how to talk to it without any library of ours."""

    def __init__(self, arguments: tuple[str, ...], folder: Path, **environment: str) -> None:
        self.stderr = (folder / "stderr").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            env={**os.environ, **environment},
            cwd=folder,
            text=True,
        )
        assert self.process.stdout is not None
        announced = json.loads(self.process.stdout.readline() or "{}")
        self.url, self.token = announced.get("url", ""), announced.get("token", "")

    def request(self, path: str, body: Any = None, token: str | None = None) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {token or self.token}"}
        data = None if body is None else json.dumps(body).encode()
        if data is not None:
            headers["Content-Type"] = "application/json"
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with DIRECT.open(request, timeout=60) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def talk(self) -> str:
        return Path(self.stderr.name).read_text()

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        """Exit status, what was left on stdout, and all of stderr."""
        self.process.send_signal(number)
        rest, _ = self.process.communicate(timeout=20)
        return self.process.returncode, rest, self.talk()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Running]]:
    monkeypatch.delenv("STAGEWRIGHT_TOKEN", raising=False)
    started: list[Running] = []

    def start(*arguments: str, **environment: str) -> Running:
        started.append(Running(arguments, tmp_path, **environment))
        return started[-1]

    yield start
    for running in started:
        if running.process.poll() is None:
            running.process.kill()
        running.process.communicate()
        running.stderr.close()


def num_marked(mark: str) -> int:
    """Count the processes with a mark in their environment."""
    found = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found += mark.encode() in (folder / "environ").read_bytes()
    return found


def test_a_server_that_is_killed_takes_its_solver_processes_along(start, profile):
    mark = f"marked-{os.getpid()}-{time.monotonic_ns()}"
    running = start(*MODULE, "--port", "0", MARK=mark)
    assert running.request("/v1/plans", {"profile": profile, "cluster": "2xcpu"})[0] == 201
    assert num_marked(mark) >= 3, "the server, what solver processes are forked from, and one"
    running.end(signal.SIGKILL)
    wait_for(lambda: num_marked(mark) == 0)


def test_it_plans_a_posted_profile_keeps_it_and_ends_cleanly(start, profile, tmp_path):
    running = start(*MODULE, "--port", "0")
    assert running.request("/healthz")[0] == 200
    assert running.request("/v1/plans", token="wrong")[0] == 401
    status, created = running.request("/v1/plans", {"profile": profile, "cluster": "2xcpu"})
    assert (status, created["status"]) == (201, "planned")
    code, rest, talk = running.end(signal.SIGTERM)
    assert code == 0, talk
    assert rest == "", "only the first line belongs on stdout"
    assert "Traceback" not in talk
    assert running.url in talk

    again = start(*MODULE, "--port", "0", STAGEWRIGHT_TOKEN="chosen-by-the-user")
    assert again.token is None, "who chose it knows it"
    answer = again.request(f"/v1/plans/{created['id']}", token="chosen-by-the-user")
    assert answer == (200, created)
    code, _, talk = again.end(signal.SIGINT)
    assert code == 0, talk
    assert "Traceback" not in talk
    assert "chosen-by-the-user" not in talk
    assert (tmp_path / "stagewright.db").exists()


def test_a_server_without_a_sandbox_says_so_when_it_starts(start, tmp_path):
    """Not first when somebody sends a model."""
    running = start(*MODULE, "--port", "0", PATH=str(tmp_path))
    line = "no sandbox: bubblewrap (bwrap) is not installed; install your system's 'bubblewrap'"
    wait_for(lambda: line in running.talk())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_command_it_prints_works_as_printed(start):
    running = start(*MODULE, "--port", "0", STAGEWRIGHT_LOG_FORMAT="console")
    wait_for(lambda: "/v1/plans\n" in running.talk())
    command = running.talk().partition("small model\n")[2].partition("/v1/plans\n")
    done = subprocess.run(
        "".join(command[:2]).replace("curl ", "curl --silent "),
        shell=True,
        capture_output=True,
        text=True,
        check=True,
    )
    answer = json.loads(done.stdout)
    if answer.get("kind") == "plan":  # a busy machine estimates for longer than an answer waits
        job = f"/v1/jobs/{answer['id']}"
        wait_for(lambda: running.request(job)[1]["result"] is not None, timeout_s=180)
        answer = running.request(running.request(job)[1]["result"]["href"])[1]
    assert answer["status"] == "planned", answer


def test_a_signal_ends_a_measurement_in_progress(start, tmp_path):
    program = (
        "import os, time\n"
        f"open({str(tmp_path / 'part')!r}, 'w').write(str(os.getpid()))\n"
        f"os.rename({str(tmp_path / 'part')!r}, {str(tmp_path / 'pid')!r})\n"
        "time.sleep(600)"
    )
    starter = (
        "import sys\n"
        "from stagewright.api import server\n"
        "from stagewright.api.settings import settings\n"
        f"command = (sys.executable, '-c', {program!r})\n"
        "chosen = settings.ServerSettings(token='t' * 8, database=':memory:', sandbox='off',\n"
        "    measure_command=command)\n"
        "server.run(chosen, '127.0.0.1', 0)"
    )
    running = start("-c", starter)

    answers: list[tuple[int, Any]] = []
    asking = threading.Thread(
        target=lambda: answers.append(
            running.request("/v1/plans", measure_example(), token="t" * 8)
        )
    )
    asking.start()
    wait_for((tmp_path / "pid").exists)
    pid = int((tmp_path / "pid").read_text())
    code, _, talk = running.end()
    asking.join(timeout=20)
    assert code == 0, talk
    # Dask's worker logs a traceback of its own if its heartbeat meets the end of the scheduler.
    # As JSON it is one line; before logging is set up, or after, it is several.
    ours = re.sub(r"[^\n]*heartbeat\.\n(?:(?!\{).*\n?)*", "", talk)
    ours = "\n".join(line for line in ours.splitlines() if '"logger": "distributed.' not in line)
    assert "Traceback" not in ours
    ((status, job),) = answers
    assert (status, job["kind"], job["state"]) == (202, "plan", "running")
    wait_for(lambda: not Path(f"/proc/{pid}").exists())


MEBIBYTE = 2**20


def pieces(size_bytes: int) -> Iterator[bytes]:
    for _ in range(size_bytes // MEBIBYTE):
        yield b" " * MEBIBYTE


@pytest.mark.parametrize(
    "body",
    [lambda: b" " * 20 * MEBIBYTE, lambda: pieces(20 * MEBIBYTE)],
    ids=["Content-Length", "chunked"],
)
def test_a_client_that_sends_too_much_hears_so(start, body):
    """Cause: the answer came while urllib was still sending, which reset its connection."""
    running = start(*MODULE, "--port", "0", "--database", ":memory:")
    headers = {"Authorization": f"Bearer {running.token}", "Content-Type": "application/json"}
    for _ in range(3):
        request = urllib.request.Request(running.url + "/v1/profiles", body(), headers)
        with pytest.raises(urllib.error.HTTPError) as refused:
            DIRECT.open(request, timeout=20)
        with refused.value as answer:
            assert answer.code == 413
            assert "16.0 MiB" in json.load(answer)["detail"]


def wait_for(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("--host", "0.0.0.0"), 4, "STAGEWRIGHT_TOKEN"),
        (("--database", "nowhere/at/all.db"), 2, "nowhere/at/all.db"),
    ],
)
def test_what_it_refuses_is_one_line_and_an_exit_status(start, arguments, status, words):
    running = start(*MODULE, "--port", "0", *arguments)
    assert running.process.wait(timeout=20) == status
    assert words in running.talk()
    assert running.talk().count("\n") == 1


def test_an_address_in_use_is_refused(start, tmp_path):
    running = start(*MODULE, "--port", "0")
    port = int(running.url.rpartition(":")[2])
    with pytest.raises(InvalidInput, match=f"Port {port}"):
        serve(port=port, database=tmp_path / "other.db")


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "example.org", "localhost.example"])
def test_another_address_needs_a_token(monkeypatch, host):
    monkeypatch.delenv("STAGEWRIGHT_TOKEN", raising=False)
    with pytest.raises(Refused, match="Set a token"):
        serve(host=host, port=0, database=":memory:")


@pytest.mark.parametrize("token", ["", "short", "has a space in it", "line\nbreak-line", "é" * 10])
def test_a_token_no_header_can_carry_is_refused(token):
    with pytest.raises(InvalidInput, match="A token has at least"):
        serve(port=0, database=":memory:", token=token)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("LOCALHOST", True),
     ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("host.example", False)],
)  # fmt: skip
def test_loopback_is_told_from_the_rest(host, expected):
    assert is_loopback(host) is expected


def test_the_server_imports_no_torch():
    program = (
        "import sys; import stagewright.api.server, stagewright.api.__main__; "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
