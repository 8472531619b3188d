"""What docs/service/requests.md and docs/service/client.md say works as it stands there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stagewright.api.http.examples import example_profile
from tests.api.job_children import measuring
from tests.live_service import TOKEN, live_service

ROUTE = re.compile(r"`(?:GET|POST|PATCH|DELETE) (/v1/[^`?]*)")
WAY = re.compile(r"^### (.+?)\n(.*?)(?=^##)", re.MULTILINE | re.DOTALL)

CURL = """
set -euo pipefail
curl() { command curl --silent --show-error --fail "$@"; }
stagewright() { test -f graph.json; }  # written by the test: its command has tests of its own
python3() { "$PYTHON" "$@"; }
"""


@pytest.fixture
def page(repository):
    return (repository / "docs" / "service" / "requests.md").read_text()


@pytest.fixture(scope="module")
def server():
    command = (sys.executable, "-c", measuring(example_profile()))
    with live_service(measure_command=command) as url:
        yield url


@pytest.fixture
def there(server, tmp_path, monkeypatch):
    """In an empty folder, with the service where snippets look for it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STAGEWRIGHT_SERVER", server)
    monkeypatch.setenv("STAGEWRIGHT_TOKEN", TOKEN)
    return tmp_path


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def run_python(snippet: str) -> dict[str, object]:
    names: dict[str, object] = {}
    exec(compile(snippet, "snippet", "exec"), names)
    return names


def run_curl(snippet: str, folder: Path, server: str) -> str:
    done = subprocess.run(
        ["bash", "-c", CURL + snippet],
        cwd=folder,
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHON": sys.executable,
            "NO_PROXY": "127.0.0.1",
            "URL": server,
            "AUTH": f"Authorization: Bearer {TOKEN}",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.mark.skipif(not shutil.which("curl"), reason="needs curl")
def test_every_way_works_in_python_and_with_curl(page, there, server):
    import torch

    from stagewright.capture.capture import capture

    capture(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()), torch.randn(2, 8)).write(
        "graph.json"
    )
    ways = WAY.findall(page)
    assert len(ways) == 3
    for title, text in ways:
        (python,), (shell,) = blocks(text, "python"), blocks(text, "sh")
        answer = run_python(python)["answer"]
        assert answer.require().num_stages >= 1, title
        planned = json.loads(run_curl(shell, there, server).rpartition("\n")[2])
        assert planned["status"] == "planned", title


def test_the_client_s_page_runs_from_top_to_bottom(repository, there, capsys):
    snippets = blocks((repository / "docs" / "service" / "client.md").read_text(), "python")
    assert len(snippets) == 3
    for snippet in snippets:
        run_python(snippet)
    assert "succeeded" in capsys.readouterr().out


def test_every_method_is_on_the_client_s_page(repository):
    from stagewright import AsyncClient, Client

    text = (repository / "docs" / "service" / "client.md").read_text()
    public = {name for name in vars(Client) if not name.startswith("_")} - {"close"}
    assert {name for name in public if f"`{name}`" not in text} == set()
    assert public | {"close"} == {name for name in vars(AsyncClient) if not name.startswith("_")}


def test_every_route_named_exists(client, page):
    paths = client.get("/openapi.json").json()["paths"]
    known = {re.sub(r"{\w+}", "{id}", path) for path in paths}
    named = set(ROUTE.findall(page))
    assert len(named) > 8
    assert named <= known
