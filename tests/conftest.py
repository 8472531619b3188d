"""What every test may use."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.forked_python import run_server

REPOSITORY = Path(__file__).resolve().parent.parent

COMPILING = pytest.StashKey[subprocess.Popen[bytes]]()
SERVING = pytest.StashKey[ExitStack]()
SHARED_SERVER = "TESTS_FORKING_EXECUTABLE"
"""Of the environment of several workers: what stands in for Python in all of them."""


@pytest.fixture(scope="session")
def repository() -> Path:
    """The folder that holds pyproject.toml."""
    return REPOSITORY


@pytest.fixture(autouse=True)
def as_wide_as_it_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several workers find the width of a terminal in their environment; tables would fit it."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True)
def no_estimates_of_other_tests(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Estimates are kept between commands: here, not beyond a test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("estimates")))


@pytest.fixture(scope="session")
def forking_executable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Take the place of ``sys.executable`` by forking; see `tests/forked_python.py`."""
    if shared := os.environ.get(SHARED_SERVER):
        yield Path(shared)
        return
    with run_server(tmp_path_factory.mktemp("python")) as executable:
        yield executable


@pytest.fixture
def forked_python(forking_executable: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Fork what a test, and all it calls, starts by ``sys.executable``: imports happen once."""
    monkeypatch.setattr(sys, "executable", str(forking_executable))
    monkeypatch.setenv("PYTHON_EXEC", str(forking_executable))  # torchrun starts ranks by it
    monkeypatch.setenv("STAGEWRIGHT_SANDBOX", "off")  # in which this executable does not exist
    return str(forking_executable)


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
    """Of several workers none waits for numba: it compiles once, beside their first tests.

    Nor does each start a server of forks: one forks for all.
    """
    config = session.config
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        return
    command = [sys.executable, "-m", "stagewright.planner.numba_cache"]
    config.stash[SERVING] = serving = ExitStack()
    folder = Path(serving.enter_context(tempfile.TemporaryDirectory()))
    os.environ[SHARED_SERVER] = str(serving.enter_context(run_server(folder)))
    config.stash[COMPILING] = subprocess.Popen(command, cwd=REPOSITORY)


def pytest_sessionfinish(session: pytest.Session) -> None:
    session.config.stash.get(SERVING, ExitStack()).close()
    if process := session.config.stash.get(COMPILING, None):
        process.terminate()
        process.wait()
