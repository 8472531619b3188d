"""Every snippet of README and docs runs, in order, in an empty folder.

Those of the service's requests and client have tests of their own, in `tests/api`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from stagewright.profiler.links.launch_local import free_port
from tests.docs.snippets import FENCE, SKIPPED, list_commands, read_document
from tests.docs.words import count_by_hand, count_words

ROOT = Path(__file__).parents[2]
ELSEWHERE = {"requests.md", "client.md"}
DOCUMENTS = [
    path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*/*.md")))
    if path.name not in ELSEWHERE and FENCE.search(path.read_text(encoding="utf-8"))
]
TOKEN = "choose-a-long-token"
EXECUTABLES = {
    "python": 'exec {python} "$@"',
    "stagewright": 'exec {python} -m stagewright.cli "$@"',
    "torchrun": 'exec {python} -m torch.distributed.run "$@"',
    # the documented address is a free one in the tests, and a refused request fails
    "curl": 'exec "$CURL" -sS --fail "${{@//http:\\/\\/127.0.0.1:8000/$URL}}"',
}


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


@pytest.fixture
def folder(tmp_path: Path, forked_python: str) -> Path:
    """Return an empty folder but for the repository's examples, benchmarks and a ``bin``."""
    for name in ("examples", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "bin").mkdir()
    for name, command in EXECUTABLES.items():
        executable = tmp_path / "bin" / name
        executable.write_text("#!/bin/bash\n" + command.format(python=forked_python) + "\n")
        executable.chmod(0o755)
    return tmp_path


@contextmanager
def serving(folder: Path, environment: dict[str, str], python: str) -> Iterator[dict[str, str]]:
    """Start the service in the folder; yield the variables that its documents use."""
    url = f"http://127.0.0.1:{free_port()}"
    variables = {
        "URL": url,
        "AUTH": f"Authorization: Bearer {TOKEN}",
        "STAGEWRIGHT_SERVER": url,
        "STAGEWRIGHT_TOKEN": TOKEN,
    }
    command = (python, "-m", "stagewright.cli", "serve", "--port", url.rpartition(":")[2])
    with subprocess.Popen(
        command, cwd=folder, env=environment | variables, stderr=subprocess.DEVNULL
    ) as server:
        try:
            wait_for(f"{url}/healthz", server)
            yield variables
        finally:
            server.terminate()


def wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    """Return when the service answers."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + 120
    while server.poll() is None and time.monotonic() < deadline:
        try:
            direct.open(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the service does not answer")


@pytest.mark.distributed
@pytest.mark.timeout(280)
@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_snippets_run(document: Path, folder: Path, forked_python: str) -> None:
    environment = {
        **os.environ,
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CURL": shutil.which("curl") or "curl",
    }
    served = document.parent.name == "service"
    with serving(folder, environment, forked_python) if served else nullcontext({}) as variables:
        done = subprocess.run(
            [forked_python, "-m", "tests.docs.snippets", str(document)],
            cwd=folder,
            env=environment | variables,
            capture_output=True,
            text=True,
            timeout=270,
        )
    assert done.returncode == 0, done.stderr[-5000:]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_no_snippet_is_overlooked(document: Path) -> None:
    """Sybil finds as many blocks as there are fences, and every skip has a reason in words."""
    text = document.read_text(encoding="utf-8")
    examples = list(read_document(document).examples())
    hidden = text.count("<!-- invisible-code-block: python")
    skips = text.count("<!-- skip:")
    assert len(examples) == len(FENCE.findall(text)) + hidden + skips
    assert skips == len(SKIPPED.findall(text))


def test_continued_lines_are_one_command_and_output_is_none() -> None:
    block = "$ first --option \\\n    value\nwhat it printed\n$ second\n"
    assert list(list_commands(block)) == ["first --option \\\n    value", "second"]


def test_schedules_are_drawn_as_planned(tmp_path: Path, forked_python: str) -> None:
    """The pictures in docs/concepts/schedules.md are those that the script draws today."""
    script = ROOT / "scripts" / "draw_schedules.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([forked_python, str(script), str(tmp_path)], env=environment, check=True)
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    folder = ROOT / "docs" / "images" / "schedules"
    assert drawn == {path.name: path.read_text() for path in folder.glob("*.svg")}
    assert len(drawn) == 8


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) < 900


def test_docs_are_short() -> None:
    found = count_by_hand()
    assert sum(found.values()) <= 30_000, found


def test_code_and_what_scripts_write_are_no_words_by_hand() -> None:
    text = "two words\n\n```sh\nls -l\n```\n\n<!-- written by x -->\na table\n<!-- end -->\n\nthree"
    assert count_words(text) == 3


def test_links_say_where_they_lead() -> None:
    """A link whose text is a path leads to that path."""
    for document in (ROOT / "README.md", *(ROOT / "docs").glob("*/*.md")):
        text = document.read_text(encoding="utf-8")
        for said, target in re.findall(r"\[`?([\w./-]+\.md)`?\]\(([^)#]+)", text):
            assert Path(target).name.lower() == Path(said).name.lower(), (
                f"{name_of(document)}: [{said}]({target})"
            )
