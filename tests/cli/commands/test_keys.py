"""`keys` makes, lists and revokes the keys of a service's database."""

import json

import pytest

from stagewright.api.auth.authenticate import principal_of_key
from stagewright.api.store.records import DEFAULT_PROJECT, Quotas
from stagewright.api.store.store import Store


@pytest.fixture
def opened(tmp_path):
    """The database commands use without further words."""
    store = Store(tmp_path / "stagewright.db")
    yield store
    store.close()


def test_a_key_made_opens_what_it_says_until_it_is_revoked(run, opened):
    ran = run("keys", "create", "ci")
    assert ran.code == 0, ran.stderr
    secret = ran.stdout.strip()
    assert secret.startswith("sw_")
    assert secret not in ran.stderr
    key = opened.keys.by_secret(secret)
    assert (key.name, key.scopes, key.project_id) == ("ci", ("read", "plan"), DEFAULT_PROJECT)
    assert (key.quotas, key.expires_at) == (Quotas(), None)

    listed = run("keys", "list").stdout
    assert key.id in listed
    assert "read,plan" in listed
    assert secret not in listed
    assert "revoked" in run("keys", "revoke", key.id).stdout
    assert opened.keys.by_secret(secret) is None
    assert "revoked" in run("keys", "list").stdout
    actions = [entry.action for entry in opened.audit.entries(limit=10).items]
    assert actions == ["api-keys.delete", "api-keys.create"]


def test_everything_about_a_key_can_be_said(run, opened):
    ran = run(
        "keys", "create", "gpu", "--scopes", "measure, admin,read", "--project", "team",
        "--new-project", "--expires-days", 2, "--requests-per-minute", 30,
        "--unfinished-jobs", 0, "--json",
    )  # fmt: skip
    assert (ran.code, ran.stderr) == (0, "")
    made = json.loads(ran.stdout)
    key = opened.keys.by_secret(made["secret"])
    assert principal_of_key(key).scopes == {"read", "measure", "admin"}
    assert key.quotas == Quotas(max_requests_per_minute=30, max_unfinished_jobs=0)
    assert (key.expires_at - key.created_at).total_seconds() == pytest.approx(2 * 86400, abs=5)
    assert {project.name for project in opened.projects.list()} == {"default", "team"}
    run("keys", "create", "other")
    everyones = json.loads(run("keys", "list", "--json").stdout)["keys"]
    assert {(key["name"], key["project"]) for key in everyones} == {
        ("gpu", "team"), ("other", "default")
    }  # fmt: skip
    heading, _, *rows = run("keys", "list").stdout.splitlines()
    assert heading.split() == ["key", "project", "name", "scopes", "created", "quotas", "state"]
    assert "30 requests/min, 0 unfinished jobs" in next(row for row in rows if " gpu " in row)
    assert f"{key.created_at:%Y-%m-%d %H:%M:%S}" in "".join(rows), "two of one name differ by it"
    teams = json.loads(run("keys", "list", "--project", "team", "--json").stdout)["keys"]
    assert [key["name"] for key in teams] == ["gpu"]
    assert run("keys", "revoke", everyones[0]["id"], "--project", "team").code == 2


def test_a_name_does_nothing_to_the_terminal(run, opened):
    opened.keys.create(DEFAULT_PROJECT, name="a\x1b[2J\nkey_1", scopes=["read"])
    assert "a?[2J?key_1" in run("keys", "list").stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["create"], "create requires a name"),
        (["list", "x"], "list takes neither"),
        (["list"], "database stagewright.db does not exist"),
        (["revoke", "key_1"], "database stagewright.db does not exist"),
        (["create", "x", "--database", "no/folder.db"], "no/folder.db"),
    ],
)
def test_what_makes_no_sense_is_refused_and_makes_no_file(run, tmp_path, words, says):
    ran = run("keys", *words)
    assert (ran.code, ran.stdout) == (2, "")
    assert says in ran.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["create", "x", "--scopes", "read,everything"], "read,plan,measure,admin"),
        (["create", "x", "--scopes", ","], "read,plan,measure,admin"),
        (["create", "x", "--project", "nowhere"], "--new-project"),
        (["create", "x", "--project", "default", "--new-project"], "already"),
        (["create", " "], "1 to 200 characters"),
        (["list", "--project", "nowhere"], "unknown project 'nowhere'"),
        (["revoke", "key_1"], "stagewright keys list"),
    ],
)
def test_what_does_not_fit_is_refused_and_makes_no_key(run, opened, words, says):
    ran = run("keys", *words)
    assert (ran.code, ran.stdout) == (2, "")
    assert says in ran.stderr
    assert not opened.keys.list(DEFAULT_PROJECT)
