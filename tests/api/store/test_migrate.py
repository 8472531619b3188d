"""Migrations make the tables the code expects, once, whole or not at all."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect

from stagewright.api.http.examples import example_profile
from stagewright.api.store.database import IN_MEMORY, Database, utc_now
from stagewright.api.store.errors import RecordNotFound
from stagewright.api.store.migrate import MIGRATIONS, upgrade
from stagewright.api.store.records import DEFAULT_PROJECT as HERE
from stagewright.api.store.store import Store
from stagewright.api.store.tables import METADATA, PLANS, PROFILES, REVISION
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import InvalidInput
from stagewright.core.profile.profile import Profile
from tests.api.stored import infeasible

OLD_TABLES = """
CREATE TABLE profiles (position INTEGER NOT NULL, id VARCHAR NOT NULL, created_at VARCHAR NOT NULL,
    document TEXT NOT NULL, PRIMARY KEY (position), UNIQUE (id));
CREATE TABLE plans (position INTEGER NOT NULL, id VARCHAR NOT NULL, created_at VARCHAR NOT NULL,
    profile_id VARCHAR NOT NULL, status VARCHAR NOT NULL, model VARCHAR, num_stages INTEGER,
    step_time_s FLOAT, document TEXT NOT NULL, PRIMARY KEY (position), UNIQUE (id),
    FOREIGN KEY(profile_id) REFERENCES profiles (id));
PRAGMA user_version = 1;
"""
"""As releases before migrations made them."""

PROFILE = Profile.model_validate(example_profile())
MOMENTS = ("2025-01-01T00:00:00+00:00", "2025-01-01T00:00:01.500000+00:00")


def old_file(path: Path) -> Path:
    """A file such a release left, with a profile and two plans."""
    with sqlite3.connect(path) as file:
        file.executescript(OLD_TABLES)
        row = (1, PROFILE.content_id(), MOMENTS[0], PROFILE.to_json())
        file.execute("INSERT INTO profiles VALUES (?, ?, ?, ?)", row)
        for number, moment in enumerate(MOMENTS, start=1):
            record = infeasible(PROFILE.content_id(), float(number + 1))
            file.execute(
                "INSERT INTO plans VALUES (?, ?, ?, ?, 'infeasible', NULL, NULL, NULL, ?)",
                (number, record.record_id(), moment, PROFILE.content_id(),
                 record.model_dump_json()),
            )  # fmt: skip
    file.close()
    return path


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
import sys, alembic.migration, alembic.operations, alembic.script
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
from alembic import op
from stagewright.api.store.store import Store
drop = op.drop_table
def killed(name):
    if name == "old_plans":
        os.kill(os.getpid(), signal.SIGKILL)
    drop(name)
op.drop_table = killed
Store(sys.argv[1])
"""


def kill_while_migrating(address: object) -> None:
    process = run_python(KILLED, address)
    _, talk = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, talk


def test_migrations_make_the_tables_of_the_code(address):
    with closing(Database(address, now=utc_now)) as database:
        upgrade(database)
        with database.read() as connection:
            context = MigrationContext.configure(connection, opts={"compare_type": True})
            assert compare_metadata(context, METADATA) == []


def test_the_code_names_the_last_migration():
    scripts = ScriptDirectory(str(MIGRATIONS)).walk_revisions()
    revisions = [script.revision for script in scripts][::-1]
    assert revisions[-1] == REVISION
    assert revisions == sorted(revisions)


class TestOldFile:
    def test_what_it_held_belongs_to_the_default_project(self, tmp_path):
        store = Store(old_file(tmp_path / "old.db"))
        (profile,) = store.documents.profiles(HERE, limit=9).items
        assert (profile.id, profile.model) == (PROFILE.content_id(), PROFILE.model)
        assert profile.num_layers == len(PROFILE.layers)
        assert store.documents.profile(HERE, profile.id).profile == PROFILE
        plans = store.documents.plans(HERE, limit=9).items
        assert [plan.created_at for plan in plans] == [
            datetime.fromisoformat(moment).astimezone(UTC) for moment in MOMENTS[::-1]
        ]
        for plan, required in zip(plans, (3.0, 2.0), strict=True):
            assert store.documents.plan(HERE, plan.id).infeasible.required == required
        with pytest.raises(RecordNotFound):
            store.documents.plan(store.projects.create("other").id, plans[0].id)
        store.close()

    def test_killed_half_way_it_is_what_it_was_and_servers_that_start_together_go_on(
        self, tmp_path
    ):
        path = old_file(tmp_path / "old.db")
        before = contents(path)
        kill_while_migrating(path)
        assert contents(path) == before
        assert open_at_once(path) == ["1 2"] * 2

    def test_releases_from_before_refuse_it_afterwards(self, tmp_path):
        """They read ``user_version`` and nothing else, and know 0 and 1."""
        Store(old_file(tmp_path / "old.db")).close()
        assert contents(tmp_path / "old.db")[-1] == "(2,)"


def test_lists_say_the_same_of_what_was_stored_before_they_did(tmp_path, postgres):
    """Revision 0003 reads the documents again."""
    spec = {"family": "gpt2", "config": {}}
    profile = Profile.model_validate({**example_profile(), "spec": spec})
    mixed = Cluster.parse("2x80GB,1x24GB")
    record = infeasible(profile.content_id()).model_copy(update={"cluster": mixed})
    shared = {"project_id": HERE, "created_at": utc_now()}
    before = {
        PROFILES: {"id": profile.content_id(), "model": profile.model, "num_layers": 4,
                   "estimated": False, "document": profile.to_json()},
        PLANS: {"id": record.record_id(), "profile_id": profile.content_id(),
                "status": "infeasible", "document": record.model_dump_json()},
    }  # fmt: skip
    for address in (str(tmp_path / "store.db"), postgres.url(postgres.new_database())):
        with closing(Database(address, now=utc_now)) as database:
            upgrade(database, "0002")
            with database.write() as connection:
                for table, values in before.items():
                    connection.execute(table.insert().values(**values, **shared))
            assert upgrade(database) == ("0002", REVISION)
        store = Store(address)
        (plan,) = store.documents.plans(HERE, limit=9).items
        assert (plan.model, plan.family) == (profile.model, "gpt2")
        assert (plan.num_layers, plan.num_parameters) == (4, 4 * 2**20)
        assert (plan.devices, plan.schedule) == ("2 x 80GB, 1 x 24GB", "1f1b")
        # Revision 0005 added labels, which plans of before can be given, too.
        kept = store.documents.plan(HERE, record.record_id())
        assert (kept.name, kept.tags, kept.notes) == (None, (), None)
        assert kept.infeasible == record.infeasible
        assert store.documents.label_plan(HERE, kept.id, {"tags": ("old",)}).tags == ("old",)
        store.close()


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


class TestPostgres:
    def test_killed_half_way_nothing_is_left_and_servers_may_start_together(self, postgres):
        url = postgres.url(postgres.new_database())
        kill_while_migrating(url)
        with closing(Database(url, now=utc_now)) as database, database.read() as connection:
            assert inspect(connection).get_table_names() == []
        assert open_at_once(url) == ["1 0"] * 2


class TestRefused:
    def test_a_newer_releases_database(self, tmp_path, postgres):
        for address in (str(tmp_path / "store.db"), postgres.url(postgres.new_database())):
            with closing(Database(address, now=utc_now)) as database:
                upgrade(database)
                with database.write() as connection:
                    connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
                with pytest.raises(InvalidInput, match=r"has revision 9999.*newer release") as no:
                    upgrade(database)
                assert REVISION in str(no.value)

    def test_somebody_elses_tables(self, tmp_path):
        with sqlite3.connect(tmp_path / "other.db") as other:
            other.execute("CREATE TABLE customers (name TEXT)")
        other.close()
        with pytest.raises(InvalidInput, match="something else \\(customers\\)"):
            Store(tmp_path / "other.db")
        assert "customers" in str(contents(tmp_path / "other.db"))
        assert "plans" not in str(contents(tmp_path / "other.db"))

    def test_a_file_of_another_program(self, tmp_path):
        with sqlite3.connect(tmp_path / "other.db") as other:
            other.execute("PRAGMA user_version = 7")
        other.close()
        with pytest.raises(InvalidInput, match="version 7"):
            Store(tmp_path / "other.db")

    def test_a_store_that_someone_upgraded_meanwhile_is_no_longer_sound(self, tmp_path):
        """What readiness asks: a server of the old release still runs beside."""
        store = Store(tmp_path / "store.db")
        store.check()
        with sqlite3.connect(tmp_path / "store.db") as other:
            other.execute("UPDATE alembic_version SET version_num = '9999'")
        other.close()
        with pytest.raises(InvalidInput, match="9999"):
            store.check()
        store.close()


def test_a_database_up_to_date_is_opened_without_alembic(tmp_path):
    """It costs a second to import, on every start."""
    Store(tmp_path / "store.db").close()
    code = (
        "import sys; from stagewright.api.store.store import Store\n"
        "Store(sys.argv[1]).close(); sys.exit('alembic' in sys.modules)"
    )
    done = run_python(code, tmp_path / "store.db")
    assert (done.communicate(timeout=60)[1], done.returncode) == ("", 0)


def test_in_memory_every_store_is_its_own():
    first, second = Store(IN_MEMORY), Store(IN_MEMORY)
    first.projects.create("only here")
    assert len(second.projects.list()) == 1
    first.close()
    second.close()
