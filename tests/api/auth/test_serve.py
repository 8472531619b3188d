"""What opens a server, by where it listens; and what its documentation says of it."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from stagewright.api import server as serving
from stagewright.api.auth.scopes import MEANING
from stagewright.api.server import announce, serve
from stagewright.api.settings.names import setting_names
from stagewright.api.settings.settings import ServerSettings
from stagewright.api.store.store import Store
from stagewright.core.errors import InvalidInput, Refused

OPEN = "0.0.0.0"
OIDC = "STAGEWRIGHT_OIDC_"


@pytest.fixture
def served(monkeypatch):
    """The settings servers would have run with."""
    found = []
    monkeypatch.setattr(serving, "run", lambda settings, *_, **__: found.append(settings))
    monkeypatch.delenv("STAGEWRIGHT_TOKEN", raising=False)
    return found


def test_a_key_that_works_opens_an_address_others_reach(served, tmp_path):
    database = tmp_path / "s.db"
    with pytest.raises(Refused, match="stagewright keys create"):
        serve(host=OPEN, database=database)
    assert not database.exists(), "refusing makes no file"
    store = Store(database)
    key = store.keys.create("project_default", name="n", scopes=["read"]).key
    serve(host=OPEN, database=database)
    assert served[-1].token is None
    store.keys.revoke("project_default", key.id)
    store.close()
    with pytest.raises(Refused):
        serve(host=OPEN, database=database)


def test_an_identity_provider_opens_an_address_others_reach(served, monkeypatch):
    for name, value in (("ISSUER", "i"), ("AUDIENCE", "a"), ("JWKS_URL", "https://id.example/k")):
        monkeypatch.setenv(OIDC + name, value)
    serve(host=OPEN, database=":memory:")
    assert (served[-1].token, served[-1].oidc.issuer) == (None, "i")
    serve(database=":memory:")
    assert len(served[-1].token) >= 32, "on this machine a token is made up all the same"
    monkeypatch.setenv(OIDC + "JWKS_URL", "http://id.example/k")
    with pytest.raises(InvalidInput, match="https"):
        serve(database=":memory:")


def test_without_a_token_it_says_what_opens_it(capsys):
    announce("http://host:1", None)
    said = capsys.readouterr()
    assert said.out == '{"url": "http://host:1", "token": null}\n'
    assert "token: the one you chose" in said.err


def test_every_scope_and_variable_is_written_down():
    text = (Path(__file__).parents[3] / "docs" / "service" / "access.md").read_text()
    for scope, meaning in MEANING.items():
        assert f"| `{scope}` | {meaning} |" in text
    settings = [setting for setting in setting_names() if setting.path[0] == "oidc"]
    assert set(re.findall(OIDC + r"[A-Z_]+", text)) <= {one.variable for one in settings}
    table = (Path(__file__).parents[3] / "docs" / "service" / "operations.md").read_text()
    for setting in settings:
        assert f"| `{'.'.join(setting.path)}` |" in table


@pytest.mark.parametrize(("token", "is_warned"), [("choose-a-token", True), ("c" * 16, False)])
def test_a_token_that_can_be_guessed_is_warned_of(monkeypatch, caplog, token, is_warned):
    monkeypatch.setattr(serving._Server, "run", lambda *_, **__: None)
    monkeypatch.setattr(serving, "configure_logging", lambda *_, **__: None)
    monkeypatch.setattr(logging.getLogger("uvicorn.access"), "propagate", True)  # uvicorn clears it
    settings = ServerSettings(token=token, database=":memory:", scheduler="threads")
    serving.run(settings, "127.0.0.1", 0)
    warned = [one.getMessage() for one in caplog.records if "can be guessed" in one.getMessage()]
    assert len(warned) == is_warned
    assert not any(token in text for text in warned)
    assert not is_warned or "14 characters" in warned[0]
