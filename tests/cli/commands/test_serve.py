"""`serve` starts the service and ends it."""

import json
import signal
import subprocess
import sys
from http.client import HTTPConnection
from urllib.parse import urlsplit


def test_it_serves_until_interrupted(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "stagewright.cli", "serve", "--port", "0"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            url = urlsplit(json.loads(process.stdout.readline())["url"])
            connection = HTTPConnection(url.hostname, url.port, timeout=20)
            connection.request("GET", "/healthz")
            assert connection.getresponse().status == 200
            connection.close()
            process.send_signal(signal.SIGINT)
            rest, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, rest) == (0, "")
    assert (tmp_path / "stagewright.db").exists()


def test_an_open_address_needs_a_token(run, monkeypatch):
    monkeypatch.delenv("STAGEWRIGHT_TOKEN", raising=False)
    ran = run("serve", "--host", "0.0.0.0", "--port", "0")
    assert (ran.code, ran.stdout) == (4, "")
    assert "STAGEWRIGHT_TOKEN" in ran.stderr
