"""A server's process: every line of its log is JSON, and signals end it in order or at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest

from benchmarks.planner import uneven_profile

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


def test_a_search_that_the_end_cuts_short_is_answered_503_with_a_time_to_come_back(tmp_path):
    """It was a bare 500, without a problem document or Retry-After."""
    profile = uneven_profile(1000).model_dump(mode="json")
    options = {"num_microbatches": 1024, "max_replicas": None, "recompute": "auto"}
    body = {"profile": profile, "cluster": "64x8x32GB", "options": options}
    environment = {**os.environ, "STAGEWRIGHT_TOKEN": TOKEN, "STAGEWRIGHT_GRACE_S": "0.5"}
    command = [sys.executable, "-m", "stagewright.api", "--port", "0", "--database", ":memory:"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, env=environment, cwd=tmp_path, text=True
        )
    with process:
        try:
            url = json.loads(process.stdout.readline())["url"]
            headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
            request = urllib.request.Request(f"{url}/v1/plans", json.dumps(body).encode(), headers)
            metrics = urllib.request.Request(f"{url}/metrics", headers=headers)

            def end_soon():
                stop = time.monotonic() + 40
                while b"solver_running 1.0" not in DIRECT.open(metrics, timeout=20).read():
                    assert time.monotonic() < stop
                    time.sleep(0.05)
                process.send_signal(signal.SIGTERM)

            threading.Thread(target=end_soon, daemon=True).start()
            with pytest.raises(urllib.error.HTTPError) as refused:
                DIRECT.open(request, timeout=60)
            with refused.value as answer:
                assert answer.code == 503
                assert answer.headers["Retry-After"]
                assert json.load(answer)["status"] == 503
            assert process.wait(timeout=20) == 0
        finally:
            process.kill()
