"""`audit` reads what happened, page by page, and hands nothing to the terminal to obey."""

import json

import pytest

from stagewright.api.store.records import DEFAULT_PROJECT, AuditEvent
from stagewright.api.store.store import Store


@pytest.fixture
def opened(tmp_path):
    store = Store(tmp_path / "stagewright.db")
    yield store
    store.close()


def test_lines_are_read_newest_first_and_page_by_page(run, opened):
    for number in range(5):
        opened.audit.add(AuditEvent(action=f"plans.{number}", outcome="ok", project_id="p"))
    ran = run("audit", "--limit", 2)
    assert [line.split()[1] for line in ran.stdout.splitlines()] == ["plans.4", "plans.3"]
    following = ran.stderr.removeprefix("next: stagewright ").split()
    assert "plans.2" in run(*following).stdout

    opened.audit.add(AuditEvent(action="keys", outcome="ok", details={"by": "hand"}))
    assert run("audit", "--limit", 1).stdout.endswith('details={"by": "hand"}\n')
    page = json.loads(run("audit", "--limit", 3, "--json").stdout)
    assert page["entries"].pop(0)["details"] == {"by": "hand"}
    assert [entry["number"] for entry in page["entries"]] == [5, 4]


def test_one_projects_lines_can_be_had_alone(run, opened):
    other = opened.projects.create("vision")
    for project in (DEFAULT_PROJECT, other.id, None):
        opened.audit.add(AuditEvent(action="a", outcome="ok", project_id=project))
    for named in ("vision", other.id):
        assert run("audit", "--project", named).stdout.count(f"project={other.id}") == 1
        assert run("audit", "--project", named).stdout.count("\n") == 1
    assert run("audit").stdout.count("\n") == 3
    ran = run("audit", "--project", "nobody")
    assert ran.code == 2
    assert "existing projects: default, vision" in ran.stderr


def test_what_strangers_sent_is_no_command_for_a_terminal(run, opened):
    opened.audit.add(AuditEvent(action="POST /\x1b[2J\n2030-01-01 forged", outcome="ok"))
    out = run("audit").stdout
    assert "\x1b" not in out
    assert out.count("\n") == 1


def test_without_a_database_none_is_made(run, tmp_path):
    ran = run("audit")
    assert ran.code == 2
    assert "does not exist" in ran.stderr
    assert not (tmp_path / "stagewright.db").exists()
