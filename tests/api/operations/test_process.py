"""A server's process: every line of its log is JSON, and signals end it in order or at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
TOKEN = "chosen-by-the-operator"


def status(url, path, token=None, **body):
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(url + path, data, headers)
    try:
        with DIRECT.open(request, timeout=20) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_the_first_signal_drains_and_the_second_ends(tmp_path):
    """The delay is long, so that only the second can have ended it."""
    (tmp_path / "settings.toml").write_text(
        'port = 0\ndatabase = ":memory:"\ndrain_delay_s = 600\nplan_processes = 0\n'
        'metrics_listen = "127.0.0.1:0"'
    )
    variables = {name: text for name, text in os.environ.items() if "STAGEWRIGHT" not in name}
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(
            [sys.executable, "-m", "stagewright.api", "--config", "settings.toml"],
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=tmp_path,
            env={**variables, "STAGEWRIGHT_TOKEN": TOKEN},
            text=True,
        ) as process,
    ):
        try:
            announced = json.loads(process.stdout.readline())
            url = announced["url"]
            assert announced["token"] is None
            assert status(url, "/readyz") == 200
            assert status(url, f"/v1/plans?token={TOKEN}", TOKEN) == 422, "no such parameter"
            process.send_signal(signal.SIGTERM)
            end = time.monotonic() + 20
            while status(url, "/readyz") == 200:
                assert time.monotonic() < end
                time.sleep(0.02)
            assert status(url, "/v1/plans", TOKEN, wrong=1) in (415, 422), "not refused yet"
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=20) == 6
        finally:
            process.kill()
    text = (tmp_path / "log").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert {"serving", "request", "draining: not ready from now on"} <= {
        line["event"] for line in lines
    }
    assert any(line["logger"] == "uvicorn.error" for line in lines)
    assert TOKEN not in text
    assert "Traceback" not in text
