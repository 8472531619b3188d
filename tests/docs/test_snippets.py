"""Every snippet of the README and the documentation runs, in order, in an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from stagewright.api.http.examples import example_profile
from tests.api.job_children import measuring
from tests.docs.snippets import FENCE, SKIPPED, list_commands, read_document
from tests.live_service import TOKEN, live_service

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    path
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if FENCE.search(path.read_text(encoding="utf-8"))
]
TWO_RANKS = "<!-- snippets: two ranks -->"
SERVICE = "<!-- snippets: service -->"


@pytest.fixture
def folder(tmp_path: Path, forked_python: str) -> Path:
    """Return an empty folder but for the repository's examples, benchmarks and a ``bin``."""
    for name in ("examples", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "bin").mkdir()
    commands = {"python": "", "stagewright": "-m stagewright.cli"}
    commands["torchrun"] = "-m torch.distributed.run"
    for name, module in commands.items():
        executable = tmp_path / "bin" / name
        executable.write_text(f'#!/bin/sh\nexec {forked_python} {module} "$@"\n')
        executable.chmod(0o755)
    return tmp_path


@pytest.mark.distributed
@pytest.mark.timeout(280)
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_snippets_run(document: Path, folder: Path, forked_python: str) -> None:
    text = document.read_text(encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    ranks = launcher if TWO_RANKS in text else []
    serving: AbstractContextManager[str] = nullcontext("")
    if SERVICE in text:
        serving = live_service(measure_command=(sys.executable, "-c", measuring(example_profile())))
    with serving as url:
        path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
        environment |= {"OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1"}
        if url:
            environment |= {"STAGEWRIGHT_SERVER": url, "STAGEWRIGHT_TOKEN": TOKEN}
        done = subprocess.run(
            [forked_python, *ranks, "-m", "tests.docs.snippets", str(document)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=270,
        )
    assert done.returncode == 0, done.stderr[-5000:]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
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
