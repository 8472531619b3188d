"""A service in this process, with the real planner and a store in memory."""

from __future__ import annotations

import copy
import logging
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from stagewright.api.app import create_app
from stagewright.api.http.examples import example_profile
from stagewright.api.settings.settings import (
    ESTIMATE_COMMAND,
    MEASURE_COMMAND,
    ServerSettings,
)
from stagewright.api.store.database import IN_MEMORY
from stagewright.api.store.store import Store
from stagewright.api.store.tables import METADATA, PROJECTS
from stagewright.api.telemetry.logs import NOISY
from tests.api.postgres_server import PostgresServer, postgres_server, why_not
from tests.shared_solvers import shared_solvers

TOKEN = "a-token-for-tests"


@pytest.fixture(autouse=True, scope="session")
def _share_solvers() -> Iterator[None]:
    """Plan in processes, as by default: those that one service leaves are the next one's."""
    with shared_solvers():
        yield


@pytest.fixture
def token() -> str:
    return TOKEN


@pytest.fixture
def profile() -> dict[str, Any]:
    """A profile as JSON, to be changed at will."""
    return copy.deepcopy(example_profile())


@pytest.fixture
def child() -> Callable[[str], tuple[str, ...]]:
    """A stand-in for the measuring child: a Python program given as text."""
    return lambda program: (sys.executable, "-c", program)


@pytest.fixture
def forked_children(forked_python: str) -> dict[str, Any]:
    """Settings of a service whose children fork from a process that has imported torch."""
    return {
        "measure_command": (forked_python, *MEASURE_COMMAND[1:]),
        "estimate_command": (forked_python, *ESTIMATE_COMMAND[1:]),
        "sandbox": "off",
    }


@pytest.fixture
def make_client(token: str, request: pytest.FixtureRequest) -> Iterator[Callable[..., TestClient]]:
    """Clients of services with settings of their own; bugs come back as responses.

    A test marked ``in_threads`` replaces what plans, and no other process would see that.
    """
    planning = {"plan_processes": 0} if request.node.get_closest_marker("in_threads") else {}
    with ExitStack() as stack:

        def make(*, store: Any = None, authorized: bool = True, **settings: Any) -> TestClient:
            app = create_app(
                ServerSettings(
                    **{
                        "token": token,
                        "database": IN_MEMORY,
                        "scheduler": "threads",
                        **planning,
                        **settings,
                    }
                ),
                store=store,
            )
            client = TestClient(app, base_url="http://localhost", raise_server_exceptions=False)
            if authorized:
                client.headers["Authorization"] = f"Bearer {token}"
            return stack.enter_context(client)

        yield make


@pytest.fixture
def own_logging() -> Iterator[None]:
    """The root logger without handlers, to be configured; all of it is restored afterwards.

    Levels are set by `setLevel`, which clears what every logger remembers of them.
    """
    uvicorn = ("uvicorn", "uvicorn.error", "uvicorn.access")  # a server in a thread sets theirs
    loggers = [logging.getLogger(), *map(logging.getLogger, (*NOISY, *uvicorn))]
    levels = [log.level for log in loggers]
    for log in map(logging.getLogger, uvicorn):
        log.setLevel(logging.NOTSET)
        log.propagate, log.handlers = True, []
    handlers, showwarning = loggers[0].handlers, warnings.showwarning
    loggers[0].handlers = []
    yield
    logging.captureWarnings(False)
    warnings.showwarning = showwarning
    loggers[0].handlers = handlers
    for log, level in zip(loggers, levels, strict=True):
        log.setLevel(level)


@pytest.fixture
def client(make_client: Callable[..., TestClient]) -> TestClient:
    return make_client()


EMPTY = (
    ";".join(
        f"DELETE FROM {table.name}" + (" WHERE name <> 'default'" if table is PROJECTS else "")
        for table in reversed(METADATA.sorted_tables)
    )
    + ";UPDATE projects SET stored_size = 0"
)
"""Leaves what a new database holds."""


class Clock:
    """A clock that goes on by a second whenever it is read."""

    def __init__(self) -> None:
        self.time = datetime(2025, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        self.time += timedelta(seconds=1)
        return self.time


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server; its database ``ready`` holds the tables and nothing else."""
    if reason := why_not():
        pytest.skip(reason)
    with postgres_server() as server:
        server.execute("CREATE DATABASE ready")
        Store(server.url("ready")).close()
        yield server


@pytest.fixture(scope="session")
def ready_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SQLite file that holds the tables and nothing else."""
    path = tmp_path_factory.mktemp("ready") / "ready.db"
    Store(path).close()
    return path


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a database with its tables and nothing else is, of each kind."""
    if request.param == "memory":
        return IN_MEMORY
    if request.param == "sqlite":
        return str(shutil.copy(request.getfixturevalue("ready_file"), tmp_path / "store.db"))
    server: PostgresServer = request.getfixturevalue("postgres")
    server.execute(EMPTY, "ready")  # a new database would take half a second
    return server.url("ready")


@pytest.fixture(params=["sqlite", "postgresql"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An address where nothing is yet."""
    if request.param == "sqlite":
        return str(tmp_path / "restored.db")
    server = request.getfixturevalue("postgres")
    return server.url(server.new_database())


@pytest.fixture
def store(address: str, clock: Clock) -> Iterator[Store]:
    opened = Store(address, now=clock)
    yield opened
    opened.close()
