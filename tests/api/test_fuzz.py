"""A slice of `make fuzz`: the same server, hooks and checks, fewer requests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
from schemathesis.core.failures import Failure

from scripts import fuzz
from scripts.fuzzing import hooks
from scripts.fuzzing.mutate import ODD, changed
from scripts.limits import SERVER_BYTES, Watched

ROOT = Path(__file__).resolve().parents[2]
LEAST = 400


@pytest.mark.slow
def test_generated_requests_are_answered_as_documented():
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "scripts" / "fuzz.py"), "--requests", str(LEAST),
            "--examples", "1", "--phases", "examples,coverage", "--quick", "--seed", "1",
        ],
        capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    told = done.stdout.strip().splitlines()[-1]
    assert int(told.split()[0]) >= LEAST, told
    assert "0 answered 5xx, 0 tracebacks" in told


@pytest.mark.parametrize(
    ("counts", "failed", "log", "alive", "server_bytes"),
    [
        ({"GET /a 500": 1, "GET /a 200": 9}, False, "", True, 1),
        ({"GET /a 504": 1}, False, "", True, 1),
        ({"GET /a 200": 9, "GET /a 429": 1}, False, "", True, 1),
        ({"GET /a 200": 10}, True, "", True, 1),
        ({"GET /a 200": 10}, False, "Traceback (most recent call last)", True, 1),
        ({"GET /a 200": 10}, False, "", False, 1),
        ({"GET /a 200": 10}, False, "", True, SERVER_BYTES + 1),
    ],
)
def test_any_failure_is_told_by_the_exit_code(counts, failed, log, alive, server_bytes):
    memory = Watched(server_bytes)
    assert fuzz.report(Counter(counts), failed, log, alive, 0, 1.0, memory) == 1


def test_without_a_failure_it_is_0(capsys):
    memory = Watched(SERVER_BYTES)
    assert fuzz.report(Counter({"GET /a 200": 10}), False, "", True, 0, 1.0, memory) == 0
    assert "10 requests to 1 operations" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "took_s", "late"),
    [
        ({"deadline_s": 0.5}, 2.4, False),
        ({"deadline_s": 0.5}, 2.6, True),
        ({"deadline_s": 50}, 12.1, True),  # more than the server allows
        ({"deadline_s": "0.5"}, 11.9, False),
        (None, 12.1, True),
    ],
)
def test_a_late_answer_fails_the_run(monkeypatch, body, took_s, late):
    """By the request's own deadline where it has one, else by the server's."""
    monkeypatch.setenv(hooks.DEADLINE_VARIABLE, "10")
    case = SimpleNamespace(body=body, operation=SimpleNamespace(label="POST /v1/plans"))
    failing = (
        pytest.raises(Failure, match=f"POST /v1/plans took {took_s} s") if late else nullcontext()
    )
    with failing:
        hooks.answered_in_time(None, SimpleNamespace(elapsed=took_s), case)


def test_changed_documents_leave_the_original_and_vary():
    document = {"plan_id": "plan_0", "list": [1, {"x": 2.5}], "text": "a"}
    before = repr(document)
    made = [changed(document, Random(seed), {"plan_id": ["plan_1"]}) for seed in range(200)]
    assert repr(document) == before
    assert len({repr(entry) for entry in made}) > 100
    assert any(entry.get("plan_id") == "plan_1" for entry in made)
    assert any(odd in map(repr, entry.values()) for entry in made for odd in map(repr, ODD))
