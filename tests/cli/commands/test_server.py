"""Commands with ``--server``: what a service answers is what the command does without it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stagewright.cli.commands.jobs import detail
from stagewright.core.plan.plan import Plan
from stagewright.core.service.jobs import JobView
from tests.live_service import TOKEN, live_service


@pytest.fixture(scope="module")
def server():
    with live_service() as url:
        yield url


@pytest.fixture
def ask(run, server, monkeypatch):
    """Run a command with the service and its token."""
    monkeypatch.setenv("STAGEWRIGHT_TOKEN", TOKEN)
    return lambda *words: run(*words, "--server", server)


def test_plan_is_the_plan_made_here(ask, run, profile_file):
    words = (
        "plan", profile_file, "--devices", "2x24GB", "--microbatches", 4, "--schedule", "1f1b",
        "-o", "plan.json",
    )  # fmt: skip
    here = run(*words)
    there = ask(*words)
    assert (here.code, there.code) == (0, 0), there.stderr
    assert here.stdout == there.stdout
    assert "plan_" in there.stderr
    assert json.loads(ask(*words, "--json").stdout) == json.loads(run(*words, "--json").stdout)
    assert "existing plan" in ask(*words).stderr


def test_what_does_not_fit_is_told_in_flags_with_the_same_code(ask, run, profile_file):
    words = ("plan", profile_file, "--devices", "2x4MB")
    here, there = run(*words), ask(*words)
    assert (here.code, there.code) == (3, 3)
    for _ in range(2):  # on a busy machine the search for remedies may not end in its time
        cut_short = [each for each in (here, there) if "in the time allowed" in each.stderr]
        if not cut_short:
            break
        here, there = run(*words), ask(*words)
    assert here.stderr.splitlines()[0] == there.stderr.splitlines()[-1]


def test_show_prints_what_is_stored(ask, run, profile_file, profile):
    planned = ask("plan", profile_file, "--devices", "2x24GB", "--json", "-o", "plan.json")
    found = ask("show", profile.content_id(), "--json")
    assert json.loads(found.stdout) == json.loads(profile_file.read_text())
    plan_id = ask("plan", profile_file, "--devices", "2x24GB").stderr.split()[0]
    assert Plan.from_json(ask("show", plan_id, "--json").stdout).to_json(indent=2) == (
        planned.stdout.strip()
    )
    drawn = ask("show", plan_id, "--svg", "plan.svg")
    assert (drawn.code, "wrote plan.svg" in drawn.stderr) == (0, True)
    assert ask("show", plan_id, "--html", "there.html").code == 0
    words = ("show", "plan.json", "--html", "here.html", "--profile", profile_file)
    assert run(*words).code == 0
    assert Path("there.html").read_text() == Path("here.html").read_text()
    planned = ask("plan", profile.content_id(), "--devices", "2x24GB")
    assert planned.stderr.startswith(plan_id)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("show", "plan_x"), 2, "there is no plan"),
        (("show", "plan.json"), 2, "is not a document id"),
        (("plan", "gpt2", "-d", "2xH100", "--calibrate", "x.json"), 2, "--calibrate"),
        (("profile", "a:b", "--sample", "a:c", "--loss", "a:d"), 2, "--loss cannot be combined"),
        (("jobs", "list", "job_1"), 2, "list takes no id"),
        (("jobs", "show"), 2, "jobs show ID"),
    ],
)
def test_what_cannot_be_asked_is_refused(ask, words, code, said):
    ran = ask(*words)
    assert (ran.code, said in ran.stderr) == (code, True), ran.stderr


def test_a_wrong_token_no_server_and_a_token_for_nobody(ask, run, profile_file):
    words = ("plan", profile_file, "-d", "2x24GB")
    assert ask(*words, "--token", "wrong-token").code == 4
    assert run(*words, "--token", "wrong-token").code == 2
    away = run("jobs", "list", "--server", "nowhere")
    assert (away.code, "is not a valid service URL" in away.stderr) == (2, True)


def test_the_token_is_not_repeated_in_the_next_command(ask, profile_file):
    ran = ask("plan", profile_file, "-d", "2x24GB", "--token", TOKEN)
    assert ran.code == 0
    assert TOKEN not in ran.stdout + ran.stderr


def job(**fields: object) -> JobView:
    common = {"id": "job_1", "kind": "profile", "state": "running", "attempt": 1}
    return JobView.model_validate({**common, "created_at": "2025-01-01T00:00:00Z", **fields})


def test_a_job_in_a_line():
    assert detail(job(progress={"step": "measuring", "done": 3, "total": 12})) == "measuring 3/12"
    assert detail(job(message="no worker offers H200")) == "no worker offers H200"
    assert (
        detail(job(result={"kind": "plan", "id": "plan_1", "href": "/v1/plans/plan_1"})) == "plan_1"
    )
    assert detail(job()) == ""
