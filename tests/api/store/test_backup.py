"""A backup is of one moment, comes back whole, and into either kind of database."""

from __future__ import annotations

import gzip
import json
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stagewright.api.http.examples import example_profile
from stagewright.api.store import backup as backup_module
from stagewright.api.store.backup import backup, restore
from stagewright.api.store.database import Database, utc_now
from stagewright.api.store.maintenance import find_faults
from stagewright.api.store.records import DEFAULT_PROJECT as HERE
from stagewright.api.store.records import Answer, AuditEvent, JobRequest
from stagewright.api.store.store import Store
from stagewright.api.store.tables import METADATA, REVISION
from stagewright.core.errors import InvalidInput
from stagewright.core.profile.profile import Profile
from tests.api.stored import a_graph, infeasible

PROFILE = Profile.model_validate(example_profile())


def fill(store: Store) -> str:
    """Put something into every table; the secret of a key."""
    secret = store.keys.create(HERE, name="ci", scopes=["read"]).secret
    store.documents.put(HERE, a_graph())
    job = store.jobs.submit(HERE, JobRequest(kind="plan", request_json="{}"))
    store.jobs.start(job.id, attempt=0, worker="w")
    record = infeasible(PROFILE.content_id())
    store.jobs.finish(job.id, 1, "succeeded", profile=PROFILE, plan=record)
    store.idempotency.claim(HERE, "k", "d", holder="us")
    store.idempotency.complete(HERE, "k", Answer(status=201), holder="us")
    store.reuse.remember(HERE, "plan", "d", record.record_id())
    store.audit.add(AuditEvent(action="a", outcome="ok"))
    return secret


def everything(database: Database) -> dict[str, list[tuple[object, ...]]]:
    with database.read() as connection:
        return {
            table.name: [
                tuple(row)
                for row in connection.execute(table.select().order_by(*table.primary_key))
            ]
            for table in METADATA.sorted_tables
        }


def lines_of(path: Path) -> list[str]:
    with gzip.open(path, "rt") as file:
        return file.readlines()


@pytest.fixture
def opened() -> Iterator[Callable[[object], Database]]:
    databases: list[Database] = []

    def open_database(address: object) -> Database:
        databases.append(Database(str(address), now=utc_now))
        return databases[-1]

    yield open_database
    for database in databases:
        database.close()


@pytest.fixture
def saved(ready_file: Path, tmp_path: Path) -> Path:
    """A backup of a database with something in every table."""
    shutil.copy(ready_file, tmp_path / "saved.db")
    store = Store(tmp_path / "saved.db")
    fill(store)
    backup(store._database, tmp_path / "saved.gz")
    store.close()
    return tmp_path / "saved.gz"


@pytest.mark.parametrize("address", ["sqlite", "postgresql"], indirect=True)
def test_everything_comes_back_in_either_kind_of_database(store, target, opened, tmp_path, clock):
    """Also what is numbered goes on where it ended, and what time it was stays."""
    secret = fill(store)
    written = backup(store._database, tmp_path / "b.gz")
    before = everything(store._database)
    assert written == {name: len(rows) for name, rows in before.items()}
    assert min(written.values()) > 0, "every table should be tried"
    assert restore(opened(target), tmp_path / "b.gz") == written
    assert everything(opened(target)) == before
    again = Store(target, now=clock)
    assert again.keys.by_secret(secret) is not None
    page = again.documents.plans(HERE, limit=1)
    again.documents.put_plan(HERE, infeasible(PROFILE.content_id(), 9.0))
    assert again.documents.plans(HERE, limit=1).items != page.items
    assert find_faults(again._database) == []
    again.close()


def test_only_its_owner_may_read_it(saved):
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600


@pytest.mark.parametrize("address", ["sqlite", "postgresql"], indirect=True)
def test_it_is_of_one_moment_while_others_write(store, opened, target, tmp_path):
    """Plans come after their profiles, so reading one table after the other would lose some."""
    ended = threading.Event()
    written = 0

    def write() -> None:
        nonlocal written
        while not ended.is_set():
            profile = PROFILE.model_copy(update={"model": f"M{written}"})
            store.documents.put(HERE, profile)
            store.documents.put_plan(HERE, infeasible(profile.content_id()))
            written += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for attempt in range(4):
            before = written
            while written < before + 5:
                ended.wait(0.01)
            rows = backup(store._database, tmp_path / f"{attempt}.gz")
    finally:
        ended.set()
        writer.join()
    assert written > rows["plans"] > 0, "nothing was written meanwhile"
    for attempt in range(4):
        rows = json.loads(lines_of(tmp_path / f"{attempt}.gz")[-1])["rows"]
        assert rows["profiles"] - rows["plans"] in (0, 1), "a plan without its profile, or more"
    restore(opened(target), tmp_path / "3.gz")
    assert find_faults(opened(target)) == []


def test_a_backup_that_is_cut_off_leaves_the_database_empty(saved, opened, target, tmp_path):
    lines = lines_of(saved)
    damaged = {
        "no end": "".join(lines[:-1]),
        "a row less": "".join([*lines[:3], *lines[4:]]),
        "half a line": "".join(lines[:5]) + lines[5][: len(lines[5]) // 2],
    }
    for name, text in damaged.items():
        with gzip.open(tmp_path / name, "wt") as file:
            file.write(text)
    (tmp_path / "half").write_bytes(saved.read_bytes()[: saved.stat().st_size // 2])
    for name in (*damaged, "half"):
        with pytest.raises(InvalidInput, match=name):
            restore(opened(target), tmp_path / name)
    assert restore(opened(target), saved)["plans"] == 1


def test_what_is_no_backup_is_refused(opened, target, tmp_path, saved):
    (tmp_path / "text").write_text("no gzip at all")
    header = json.loads(lines_of(saved)[0])
    for name, line in {
        "other": {"format": "x/1"}, "list": [1],
        "before": {**header, "revision": "0.0.9"}, "after": {**header, "revision": "9999"},
        "no revision": {"format": header["format"]},
    }.items():  # fmt: skip
        with gzip.open(tmp_path / name, "wt") as file:
            file.write(json.dumps(line) + "\n")
    for name, words in {
        "text": "cannot read", "other": "not a Stagewright", "list": "not a Stagewright",
        "before": f"revision 0.0.9, and this release reads {REVISION} only", "after": "9999",
        "no revision": "revision None", "missing": "cannot read",
    }.items():  # fmt: skip
        with pytest.raises(InvalidInput, match=words):
            restore(opened(target), tmp_path / name)


def test_a_database_that_holds_something_is_not_touched(saved, store):
    store.documents.put(HERE, PROFILE)
    before = everything(store._database)
    with pytest.raises(InvalidInput, match="already holds 1 rows of profiles"):
        restore(store._database, saved)
    assert everything(store._database) == before


def test_a_backup_that_fails_leaves_the_one_before(saved, opened, tmp_path, monkeypatch):
    before = saved.read_bytes()

    def fail(*_: object) -> Iterator[dict[str, object]]:
        yield {}
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(backup_module, "_rows", fail)
    with pytest.raises(InvalidInput, match="No space left"):
        backup(opened(tmp_path / "saved.db"), saved)
    assert saved.read_bytes() == before
    assert not list(tmp_path.glob("*.partial"))


class TestCheck:
    def test_a_filled_database_is_sound(self, store):
        fill(store)
        assert find_faults(store._database) == []

    @pytest.mark.parametrize(
        ("damage", "words"),
        [
            ("UPDATE plans SET document = '{}'", "has been altered since it was stored"),
            ("UPDATE graphs SET document = 'half a docu'", "graph_.*has been altered"),
            ("DELETE FROM job_events WHERE number = 2", "job_.*has lost events"),
            ("UPDATE jobs SET finished_at = NULL", "final state but no end"),
            ("UPDATE jobs SET state = 'running'", "no final state"),
        ],
    )
    def test_what_was_changed_behind_its_back_is_found(self, store, damage, words):
        fill(store)
        with store._database.write() as connection:
            connection.exec_driver_sql(damage)
        (fault,) = find_faults(store._database)
        assert words.partition(".*")[2] in fault
        assert words.partition(".*")[0] in fault
