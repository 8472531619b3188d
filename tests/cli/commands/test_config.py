"""`config show` says what holds and who said it, and shows no secret."""

import json
import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    for name in [name for name in os.environ if name.startswith("STAGEWRIGHT_")]:
        monkeypatch.delenv(name)


def shown(ran):
    assert ran.code == 0, ran.stderr
    return {line["name"]: line for line in json.loads(ran.stdout)["settings"]}


def test_every_value_is_shown_with_who_said_it(run, monkeypatch, tmp_path):
    monkeypatch.setenv("STAGEWRIGHT_PORT", "9000")
    (tmp_path / "s.toml").write_text('grace_s = 30\nallowed_hosts = ["plans.example"]')
    lines = shown(run("config", "show", "--config", "s.toml", "--json"))
    told = {name: (line["value"], line["origin"], line["place"]) for name, line in lines.items()}
    assert told["port"] == (9000, "environment", "STAGEWRIGHT_PORT")
    assert told["grace_s"] == (30.0, "file", "s.toml")
    assert told["allowed_hosts"] == (["plans.example"], "file", "s.toml")
    assert told["host"] == ("127.0.0.1", "default", None)
    assert told["oidc.issuer"] == (None, "default", None)
    assert told["oidc.algorithms"] == (["RS256", "ES256", "EdDSA"], "default", None)
    assert lines["grace_s"]["variable"] == "STAGEWRIGHT_GRACE_S"

    ran = run("config", "--config", "s.toml")
    assert "port " in ran.stdout
    assert "environment STAGEWRIGHT_PORT" in ran.stdout
    assert ran.stderr == "next: stagewright serve --config s.toml\n"


def test_no_secret_is_shown(run, monkeypatch):
    monkeypatch.setenv("STAGEWRIGHT_TOKEN", "hunter22-hunter22")
    monkeypatch.setenv("STAGEWRIGHT_DATABASE", "postgresql://me:hunter22@db/plans")
    for words in ((), ("--json",)):
        ran = run("config", "show", *words)
        assert "hunter22" not in ran.stdout + ran.stderr
    lines = shown(ran)
    assert lines["token"]["value"] == "********"
    assert lines["database"]["value"] == "postgresql://me:********@db/plans"


def test_what_is_no_setting_is_a_mistake(run, monkeypatch):
    monkeypatch.setenv("STAGEWRIGHT_PLAN_PROCESES", "1")
    ran = run("config", "show")
    assert ran.code == 2
    assert "did you mean STAGEWRIGHT_PLAN_PROCESSES?" in ran.stderr
    assert run("config", "show", "--config", "nowhere.toml").code == 2
    monkeypatch.delenv("STAGEWRIGHT_PLAN_PROCESES")
    Path("s.toml").write_text('databse = "x"\n[oidc]\nisuer = "x"')
    said = run("config", "show", "--config", "s.toml").stderr
    assert "mean database?" in said
    assert "mean oidc.issuer?" in said, "all of them at once"


def test_the_flags_of_serve_show_the_defaults_there_are(run):
    from stagewright.api.settings.settings import ServerSettings

    words = " ".join(run("serve", "--help").stdout.split())
    for name in ("host", "port", "database"):
        assert f"default: ({ServerSettings.model_fields[name].default})" in words


def test_commands_find_the_database_of_the_server(run, monkeypatch, tmp_path):
    """Also where the settings file names it, and nobody else does."""
    (tmp_path / "s.toml").write_text('database = "elsewhere.db"')
    monkeypatch.setenv("STAGEWRIGHT_CONFIG", "s.toml")
    assert run("keys", "create", "ci").code == 0
    assert (tmp_path / "elsewhere.db").exists()
    assert not (tmp_path / "stagewright.db").exists()
    assert "elsewhere.db: no faults found" in run("db", "check").stdout


def test_commands_take_the_settings_file_as_the_server_does(run, tmp_path):
    """Also where a secret of it, which they have no use for, is not to be had here."""
    (tmp_path / "s.toml").write_text('database = "elsewhere.db"\ntoken_file = "/nowhere/token"')
    assert run("keys", "create", "ci", "--config", "s.toml").code == 0
    assert "elsewhere.db: no faults found" in run("db", "check", "--config", "s.toml").stdout
    assert "api-keys.create" in run("audit", "--config", "s.toml").stdout
    (tmp_path / "p.toml").write_text(
        'database = "postgresql://me@db/plans"\ndatabase_password_file = "/nowhere/password"'
    )
    ran = run("db", "check", "--config", "p.toml")
    assert (ran.code, ran.stdout) == (2, "")
    assert "cannot read the secret in /nowhere/password" in ran.stderr
    given = run("db", "check", "--config", "p.toml", "--database", "elsewhere.db")
    assert given.code == 0, "what is said by a flag needs no password of a file"


def test_what_cannot_be_had_is_told_beside_its_setting(run, monkeypatch, tmp_path):
    from stagewright.api.settings.load import configure
    from stagewright.core.errors import InvalidInput

    (tmp_path / "s.toml").write_text('token_file = "/nowhere/token"\ngrace_s = 30')
    ran = run("config", "show", "--config", "s.toml")
    assert ran.code == 0, ran.stderr
    (line,) = [line for line in ran.stdout.splitlines() if line.startswith("token_file")]
    assert "(cannot read the secret in /nowhere/token: No such file" in line
    assert "a server would not start with these settings: cannot read the secret" in ran.stderr
    assert "next: stagewright serve" not in ran.stderr
    with pytest.raises(InvalidInput, match="/nowhere/token"):
        configure(file=tmp_path / "s.toml")

    monkeypatch.setenv("STAGEWRIGHT_TOKEN", "said-by-a-variable")
    lines = shown(run("config", "show", "--config", "s.toml", "--json"))
    assert lines["token"]["origin"] == "environment", "it comes before the file's token_file"
    assert configure(file=tmp_path / "s.toml").settings.token == "said-by-a-variable"

    monkeypatch.setenv("STAGEWRIGHT_TOKEN_FILE", "/nowhere/other")
    ran = run("config", "show", "--config", "s.toml")
    assert ran.code == 0
    assert "STAGEWRIGHT_TOKEN and STAGEWRIGHT_TOKEN_FILE set the same" in ran.stderr
