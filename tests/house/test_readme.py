"""The README is true: its commands and its Python run as they stand there."""

import json
import re
import shlex
import subprocess
import urllib.error
import urllib.request
from typing import Any
from urllib.request import Request

import pytest

from stagewright.cli.main import main
from stagewright.cli.support.local_service import LocalService, running_service
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.plan.plan import Plan
from stagewright.core.profile.profile import Profile
from stagewright.planner.validation.validate import validate

ELSEWHERE = ("stagewright serve", "stagewright demo", "stagewright run")
"""Commands of the README that have tests of their own."""


@pytest.fixture(scope="module")
def readme(repository) -> str:
    return (repository / "README.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_commands_run_one_after_the_other(readme, tmp_path, monkeypatch, capsys):
    """In one process: torch is imported once. `tests/cli` starts the real thing."""
    monkeypatch.chdir(tmp_path)
    lines = "".join(blocks(readme, "console")).replace("\\\n", " ").splitlines()
    commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ stagewright ")]
    commands = [command for command in commands if not command.startswith(ELSEWHERE)]
    assert len(commands) >= 3
    for command in commands:
        assert main(shlex.split(command)[1:]) == 0, f"{command}\n{capsys.readouterr().err}"
    assert {path.name for path in tmp_path.iterdir()} >= {"profile.json", "plan.json", "plan.svg"}


def test_python_runs(readme, tmp_path, forked_python):
    code = blocks(readme, "python")
    assert code
    for block in code:
        done = subprocess.run(
            [forked_python, "-c", block], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{block}\n{done.stderr}"


def ask(service: LocalService, path: str, body: bytes | None = None) -> tuple[int, dict[str, Any]]:
    """Status and JSON of an answer, past every proxy."""
    headers = {"Authorization": f"Bearer {service.token}", "Content-Type": "application/json"}
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(Request(service.url + path, body, headers), timeout=120) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_the_request_is_answered_with_a_valid_plan(readme, tmp_path, forked_python):
    ((path, body),) = re.findall(
        r"curl http://127\.0\.0\.1:8000(\S+) .*?-d '(\{.*?\})'", readme, re.DOTALL
    )
    with running_service(tmp_path / "stagewright.db") as service:
        status, answer = ask(service, path, body.encode())
        assert status == 201, answer
        _, stored = ask(service, f"/v1/profiles/{answer['profile_id']}")
    assert answer["status"] == "planned"
    validate(
        Plan.model_validate(answer["plan"]),
        Profile.model_validate(stored["profile"]),
        Cluster.model_validate(answer["cluster"]),
    )
