"""A PostgreSQL server of one's own, from the system's package, gone with the block."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

START_TIMEOUT_S = 60.0
UNPRIVILEGED = ("postgres", "nobody")
"""Who runs the server where root runs the tests: PostgreSQL refuses to be root."""


def program(name: str) -> str | None:
    """The path of one of PostgreSQL's programs; Debian keeps them out of the search path."""
    packaged = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return shutil.which(name) or (str(packaged[-1]) if packaged else None)


class PostgresServer:
    """A running server, reached by a socket in its folder: no port, so none is taken.

    Attributes:
        process: The server; tests may kill it.
    """

    def __init__(self, folder: Path, user: str | None, *, durable: bool = False) -> None:
        self._folder, self._user = folder, user
        self._fsync = "on" if durable else "off"
        self._numbers = count()
        self._run(
            "initdb",
            "-D",
            self._data,
            "-A",
            "trust",
            "-U",
            "postgres",
            "-N",
            "--locale=C",
            "-E",
            "UTF8",
        )
        self.start()

    @property
    def _data(self) -> str:
        return str(self._folder / "data")

    def start(self) -> None:
        """Start it, also after it was killed, and wait until it answers."""
        settings = (
            f"unix_socket_directories={self._folder}",
            "listen_addresses=",
            f"fsync={self._fsync}",
        )
        options = [word for setting in settings for word in ("-c", setting)]
        with (self._folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [_found("postgres"), "-D", self._data, *options],
                stdout=log, stderr=log, user=self._user, cwd=self._folder,
            )  # fmt: skip
        end = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            assert self.process.poll() is None, (self._folder / "log").read_text()
            assert time.monotonic() < end, "PostgreSQL did not start in time"
            time.sleep(0.05)

    def url(self, name: str = "postgres") -> str:
        """The address of one of its databases."""
        return f"postgresql://postgres@/{name}?host={self._folder}"

    def new_database(self, template: str = "template1") -> str:
        """Make a database; its name."""
        name = f"test_{next(self._numbers)}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return name

    def execute(self, statement: str, database: str = "postgres") -> None:
        import psycopg

        with psycopg.connect(self.url(database), autocommit=True) as connection:
            connection.execute(statement)

    def stop(self) -> None:
        """End it at once; what it would still write goes with its folder."""
        self.process.send_signal(signal.SIGQUIT)
        self.process.wait(timeout=30)

    def _answers(self) -> bool:
        import psycopg

        try:
            psycopg.connect(self.url()).close()
        except psycopg.OperationalError:
            return False
        return True

    def _run(self, name: str, *arguments: str) -> None:
        done = subprocess.run(
            [_found(name), *arguments],
            user=self._user, cwd=self._folder, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def postgres_server(*, durable: bool = False) -> Iterator[PostgresServer]:
    """A server in a folder of its own; `why_not` says whether there can be one.

    Args:
        durable: Wait for the disk at every commit, as one that is used does.
    """
    user = _unprivileged()
    folder = Path(tempfile.mkdtemp(prefix="stagewright-pg-"))
    try:
        if user is not None:
            shutil.chown(folder, user)
        server = PostgresServer(folder, user, durable=durable)
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def why_not() -> str | None:
    """Why no server can be started here, if so."""
    try:
        import psycopg  # noqa: F401
    except ImportError:
        return "needs psycopg: pip install -e '.[postgres]'"
    if program("initdb") is None or program("postgres") is None:
        return "needs PostgreSQL: apt-get install postgresql"
    if os.geteuid() == 0 and _unprivileged() is None:
        return f"PostgreSQL does not run as root, and there is none of {UNPRIVILEGED}"
    return None


def _found(name: str) -> str:
    path = program(name)
    assert path is not None, why_not()
    return path


def _unprivileged() -> str | None:
    """Another user to run it, where the tests run as root."""
    if os.geteuid() != 0:
        return None
    users = {entry.pw_name for entry in pwd.getpwall()}
    return next((name for name in UNPRIVILEGED if name in users), None)
