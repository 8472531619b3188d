"""The tables of an empty database are created once, whole or not at all."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import inspect

from stagewright.api.store.database import IN_MEMORY, Database, utc_now
from stagewright.api.store.migrate import check_revision, upgrade
from stagewright.api.store.store import Store
from stagewright.api.store.tables import REVISION
from stagewright.core.errors import InvalidInput


def contents(path: Path) -> list[str]:
    """Everything in a file, as SQL."""
    with sqlite3.connect(path) as file:
        found = list(file.iterdump())
        found.append(str(file.execute("PRAGMA user_version").fetchone()))
    file.close()
    return found


def run_python(code: str, *arguments: object) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)  # fmt: skip


OPEN = """
import sys
from stagewright.api.store.store import Store
print("ready", flush=True)
sys.stdin.readline()
store = Store(sys.argv[1])
print(len(store.projects.list()), len(store.documents.plans("project_default", limit=9).items))
store.close()
"""


def open_at_once(address: object, processes: int = 2) -> list[str]:
    """What so many servers find that start at one moment."""
    started = [run_python(OPEN, address) for _ in range(processes)]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    ended = [process.communicate(timeout=60) for process in started]
    assert [process.returncode for process in started] == [0] * processes, ended
    return [out.strip() for out, _ in ended]


KILLED = """
import os, signal, sys
from sqlalchemy import event
from stagewright.api.store.store import Store
from stagewright.api.store.tables import JOBS
event.listen(JOBS, "after_create", lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
Store(sys.argv[1])
"""


def kill_while_creating(address: object) -> None:
    process = run_python(KILLED, address)
    _, talk = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, talk


def test_a_server_killed_half_way_leaves_nothing_and_others_may_start_together(target):
    kill_while_creating(target)
    with closing(Database(target, now=utc_now)) as database, database.read() as connection:
        assert inspect(connection).get_table_names() == []
    assert open_at_once(target) == ["1 0"] * 2


def test_a_second_start_changes_nothing(tmp_path):
    path = tmp_path / "store.db"
    with closing(Database(str(path), now=utc_now)) as database:
        assert upgrade(database) is None
        created = contents(path)
        assert upgrade(database) == REVISION
    assert contents(path) == created


def test_servers_may_start_together_on_a_new_file(tmp_path):
    assert open_at_once(tmp_path / "new.db") == ["1 0"] * 2


def test_connections_may_open_a_new_file_at_once(tmp_path):
    """Switching to the write-ahead log failed at once beside another connection, one time in 25."""
    together = threading.Barrier(4)

    def open_one(path):
        together.wait()
        with closing(Database(str(path), now=utc_now)) as database, database.read() as connection:
            return connection.exec_driver_sql("PRAGMA journal_mode").scalar_one()

    with ThreadPoolExecutor(4) as threads:
        for number in range(100):
            paths = [tmp_path / f"{number}.db"] * 4
            assert list(threads.map(open_one, paths)) == ["wal"] * 4


class TestRefused:
    @pytest.mark.parametrize("other", ["0.0.9", "9999", "0006"])
    def test_another_releases_database(self, target, other):
        with closing(Database(target, now=utc_now)) as database:
            upgrade(database)
            with database.write() as connection:
                connection.exec_driver_sql(f"UPDATE schema_revision SET revision = '{other}'")
            for refuse in (upgrade, check_revision):
                with pytest.raises(InvalidInput) as refused:
                    refuse(database)
                assert f"has revision {other}" in str(refused.value)
                assert f"reads {REVISION} only; use the release that wrote it" in str(refused.value)

    def test_an_empty_database_where_one_is_needed(self, target):
        with (
            closing(Database(target, now=utc_now)) as database,
            pytest.raises(InvalidInput, match="is empty; create its tables with 'stagewright"),
        ):
            check_revision(database)

    @pytest.mark.parametrize("tables", [["alembic_version", "plans"], ["plans", "profiles"]])
    def test_a_database_from_before_the_first_release(self, tmp_path, tables):
        """With and without the table in which those kept their revision."""
        with sqlite3.connect(tmp_path / "old.db") as old:
            for table in tables:
                old.execute(f"CREATE TABLE {table} (version_num TEXT)")
        old.close()
        before = contents(tmp_path / "old.db")
        with pytest.raises(InvalidInput, match=r"Stagewright before 0\.1\.0; use an empty"):
            Store(tmp_path / "old.db")
        assert contents(tmp_path / "old.db") == before

    def test_somebody_elses_tables(self, tmp_path):
        with sqlite3.connect(tmp_path / "other.db") as other:
            other.execute("CREATE TABLE customers (name TEXT)")
        other.close()
        with pytest.raises(InvalidInput, match="something else \\(customers\\)"):
            Store(tmp_path / "other.db")
        assert "customers" in str(contents(tmp_path / "other.db"))
        assert "plans" not in str(contents(tmp_path / "other.db"))

    def test_a_store_that_someone_upgraded_meanwhile_is_no_longer_sound(self, tmp_path):
        """What readiness asks: a server of the old release still runs beside."""
        store = Store(tmp_path / "store.db")
        store.check()
        with sqlite3.connect(tmp_path / "store.db") as other:
            other.execute("UPDATE schema_revision SET revision = '9999'")
        other.close()
        with pytest.raises(InvalidInput, match="9999"):
            store.check()
        store.close()


def test_in_memory_every_store_is_its_own():
    first, second = Store(IN_MEMORY), Store(IN_MEMORY)
    first.projects.create("only here")
    assert len(second.projects.list()) == 1
    first.close()
    second.close()
