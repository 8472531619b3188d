"""`db` looks after the database of a service."""

import json
import sqlite3

import pytest

from stagewright.api.store.records import DEFAULT_PROJECT, JobRequest
from stagewright.api.store.store import Store


@pytest.fixture
def database(tmp_path, profile):
    """A database with a profile and a cancelled job, in the folder commands run in."""
    store = Store(tmp_path / "stagewright.db")
    store.documents.put(DEFAULT_PROJECT, profile)
    job = store.jobs.submit(DEFAULT_PROJECT, JobRequest(kind="plan", request_json="{}"))
    store.jobs.request_cancel(DEFAULT_PROJECT, job.id)
    store.close()
    return tmp_path / "stagewright.db"


def test_check_says_what_is_wrong(run, database):
    assert run("db", "check").stdout == "stagewright.db: no faults found\n"
    with sqlite3.connect(database) as file:
        file.execute("UPDATE profiles SET document = '{}'")
    file.close()
    ran = run("db", "check", "--json")
    assert ran.code == 2
    assert len(json.loads(ran.stdout)["faults"]) == 1
    assert "start the server with a backup" in json.loads(ran.stderr)["detail"]


def test_upgrade_says_where_it_came_from(run, tmp_path):
    ran = run("db", "upgrade", "--json")
    first = json.loads(ran.stdout)
    assert (first["revision_before"], first["database"]) == (None, "stagewright.db")
    ran = run("db", "upgrade")
    assert ran.stdout == f"stagewright.db: revision {first['revision']}, up to date\n"
    assert first["revision"] is not None


def test_prune_removes_what_is_asked_for(run, database):
    ran = run("db", "prune", "--jobs-days", 1)
    assert ran.stdout == "stagewright.db: removed nothing\n"
    ran = run("db", "prune", "--jobs-days", 0, "--json")
    assert json.loads(ran.stdout)["removed"] == {"idempotent_answers": 0, "jobs": 1}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["check"], "database stagewright.db does not exist"),
        (["prune"], "prune requires at least one of --jobs-days"),
        (["check", "--jobs-days", "3"], "prune requires at least one of --jobs-days"),
        (["check", "--database", "mysql://host/name"], "postgresql://"),
        (["upgrade", "--database", "no/folder.db"], "no/folder.db"),
    ],
)
def test_what_makes_no_sense_is_refused_and_makes_no_file(run, tmp_path, words, says):
    ran = run("db", *words)
    assert (ran.code, ran.stdout) == (2, "")
    assert says in ran.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_database_that_does_not_answer_is_told_without_its_password(run, tmp_path):
    pytest.importorskip("psycopg")
    ran = run("db", "check", "--database", f"postgresql://me:secret@/name?host={tmp_path}")
    assert ran.code == 5
    assert "secret" not in ran.stdout + ran.stderr
