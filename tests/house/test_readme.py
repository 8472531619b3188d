"""The README is true: its commands and its Python run as they stand there."""

import json
import re
import shlex
import subprocess
import sys

import pytest

from stagewright.api.requests import PlanRequest

ELSEWHERE = ("stagewright serve", "stagewright demo", "stagewright run")
"""Commands of the README that have tests of their own."""


@pytest.fixture(scope="module")
def readme(repository) -> str:
    return (repository / "README.md").read_text()


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_commands_run_one_after_the_other(readme, tmp_path):
    lines = "".join(blocks(readme, "console")).replace("\\\n", " ").splitlines()
    commands = [line.removeprefix("$ ") for line in lines if line.startswith("$ stagewright ")]
    commands = [command for command in commands if not command.startswith(ELSEWHERE)]
    assert len(commands) >= 3
    for command in commands:
        words = shlex.split(command)[1:]
        done = subprocess.run(
            [sys.executable, "-m", "stagewright.cli", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
    assert {path.name for path in tmp_path.iterdir()} >= {"profile.json", "plan.json", "plan.svg"}


def test_python_runs(readme, tmp_path):
    code = blocks(readme, "python")
    assert code
    for block in code:
        done = subprocess.run(
            [sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{block}\n{done.stderr}"


def test_request_fits_the_service(readme):
    (body,) = re.findall(r"-d '(\{.*?\})'", readme, re.DOTALL)
    request = PlanRequest.model_validate(json.loads(body))
    assert request.model is not None
