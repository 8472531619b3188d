"""The image's steps hold without docker, and its files say what they must."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from stagewright.api.server import TOKEN_VARIABLE


@pytest.fixture
def dockerfile(repository: Path) -> str:
    return (repository / "docker" / "Dockerfile").read_text()


def instructions(text: str, name: str) -> list[str]:
    joined = text.replace("\\\n", " ")
    return re.findall(rf"^{name} (.+)$", joined, re.MULTILINE)


def test_the_image_would_start_be_healthy_and_have_no_torch(repository):
    """The check with packages that are here already; `docker/check.sh` alone fetches them."""
    script = repository / "docker" / "check.sh"
    link = repository / "tests" / "api" / "link_installed.py"
    command = [script, sys.executable, link]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_package_enters_the_build(repository):
    pyproject = tomllib.loads((repository / "pyproject.toml").read_text())
    allowed = set(re.findall(r"^!(.+)$", (repository / ".dockerignore").read_text(), re.MULTILINE))
    folders = {
        folder.partition("/")[0]
        for folder in pyproject["tool"]["setuptools"]["package-dir"].values()
    }
    assert folders <= allowed
    assert all((repository / path).exists() for path in allowed)


def test_the_image_runs_the_script_that_the_check_runs(repository, dockerfile):
    (install,) = [line for line in instructions(dockerfile, "RUN") if "install-api.sh" in line]
    assert "/src/docker/install-api.sh /opt/stagewright/bin/python /src" in install
    check = (repository / "docker" / "check.sh").read_text()
    assert 'docker/install-api.sh" "$work/venv/bin/python" "$work/src"' in check


def test_the_image_does_not_run_as_root(dockerfile, repository):
    assert instructions(dockerfile, "USER") == ["stagewright"]
    worker = (repository / "docker" / "worker.Dockerfile").read_text()
    assert instructions(worker, "USER") == ["stagewright"]


def test_the_images_command_is_one_the_service_takes(dockerfile, tmp_path):
    """It listens to everyone, so without a token it refuses; with the arguments it is content."""
    command = json.loads(instructions(dockerfile, "ENTRYPOINT")[0])
    assert command[0] == "python"
    assert not instructions(dockerfile, "CMD"), "flags would come before the variables"
    (variables,) = instructions(dockerfile, "ENV")
    environment = dict(word.split("=", 1) for word in variables.split()) | {"PATH": "/usr/bin:/bin"}
    assert environment["STAGEWRIGHT_HOST"] == "0.0.0.0"
    assert TOKEN_VARIABLE not in environment
    done = subprocess.run(
        [sys.executable, *command[1:]],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 4
    assert f"Set a token in {TOKEN_VARIABLE}" in done.stderr
