"""What every test may use."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

COMPILING = pytest.StashKey[subprocess.Popen[bytes]]()


@pytest.fixture(scope="session")
def repository() -> Path:
    """The folder that holds pyproject.toml."""
    return REPOSITORY


@pytest.fixture(autouse=True)
def as_wide_as_it_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several workers find the width of a terminal in their environment; tables would fit it."""
    monkeypatch.delenv("COLUMNS", raising=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked ``gpu`` where there is none; imports torch only if there is such."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Of several workers none waits for numba: it compiles once, beside their first tests."""
    config = session.config
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        return
    command = [sys.executable, "-m", "tests.planner.compile_kernels"]
    config.stash[COMPILING] = subprocess.Popen(command, cwd=REPOSITORY)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if process := session.config.stash.get(COMPILING, None):
        process.terminate()
        process.wait()
