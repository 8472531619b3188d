"""Every snippet of the tutorials runs, in order, in an empty folder.

Of the other documents, those of the service and README's have tests of their own.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.docs.snippets import FENCE, SKIPPED, list_commands, read_document

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    path
    for path in sorted((ROOT / "docs" / "tutorials").glob("*.md"))
    if FENCE.search(path.read_text(encoding="utf-8"))
]


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
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [forked_python, "-m", "tests.docs.snippets", str(document)],
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


def test_schedules_are_drawn_as_planned(tmp_path: Path, forked_python: str) -> None:
    """The pictures in docs/concepts/schedules.md are those that the script draws today."""
    script = ROOT / "scripts" / "draw_schedules.py"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([forked_python, str(script), str(tmp_path)], env=environment, check=True)
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    folder = ROOT / "docs" / "images" / "schedules"
    assert drawn == {path.name: path.read_text() for path in folder.glob("*.svg")}
    assert len(drawn) == 8
