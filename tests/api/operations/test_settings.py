"""Settings: who said them, what is refused, and what nobody is shown."""

from __future__ import annotations

import os
import re
import shutil
import ssl
import subprocess
from importlib.util import module_from_spec, spec_from_file_location

import pytest

from stagewright.api.settings.load import Origin, configure
from stagewright.api.settings.names import setting_names
from stagewright.api.settings.settings import ServerSettings
from stagewright.api.telemetry.redaction import without_passwords
from stagewright.core.errors import InvalidInput

OIDC = {
    "STAGEWRIGHT_OIDC_ISSUER": "https://id.example",
    "STAGEWRIGHT_OIDC_AUDIENCE": "stagewright",
    "STAGEWRIGHT_OIDC_JWKS_URL": "https://id.example/keys",
}


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    for name in [name for name in os.environ if name.startswith("STAGEWRIGHT_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def said(monkeypatch, tmp_path):
    """What is found out from variables, the text of a file, and flags."""

    def said(variables=None, file=None, **flags):
        for name, value in (variables or {}).items():
            monkeypatch.setenv(name, value)
        path = None
        if file is not None:
            path = tmp_path / "settings.toml"
            path.write_text(file)
        return configure(flags, file=path)

    return said


def test_flags_come_before_variables_before_the_file_before_defaults(said):
    file = 'port = 1\nhost = "file"\ngrace_s = 1.5\n[oidc]\nissuer = "from the file"'
    variables = {**OIDC, "STAGEWRIGHT_PORT": "2", "STAGEWRIGHT_HOST": "variable"}
    configuration = said(variables, file, port=3, database=None)
    settings, origins = configuration.settings, configuration.origins
    assert (settings.port, settings.host, settings.grace_s) == (3, "variable", 1.5)
    assert settings.oidc.issuer == "https://id.example"
    assert settings.database == ServerSettings().database
    assert origins["port"] == Origin("flag", "--port")
    assert origins["host"] == Origin("environment", "STAGEWRIGHT_HOST")
    assert origins["grace_s"].kind == "file"
    assert origins["grace_s"].place.endswith("settings.toml")
    assert origins["oidc.issuer"] == Origin("environment", "STAGEWRIGHT_OIDC_ISSUER")
    assert origins["oidc.algorithms"] == origins["database"] == Origin("default")


def test_with_nothing_said_there_are_the_defaults_and_no_section(said):
    configuration = said()
    assert configuration.settings == ServerSettings()
    assert configuration.settings.oidc is None
    assert {origin.kind for origin in configuration.origins.values()} == {"default"}


def test_the_environment_names_the_file_too(said, monkeypatch, tmp_path):
    (tmp_path / "named.toml").write_text("plan_processes = 7")
    monkeypatch.setenv("STAGEWRIGHT_CONFIG", str(tmp_path / "named.toml"))
    assert configure().settings.plan_processes == 7


@pytest.mark.parametrize(
    ("variables", "file", "says"),
    [
        ({"STAGEWRIGHT_PROT": "1"}, None, "PROT is not a setting; did you mean STAGEWRIGHT_PORT"),
        ({"STAGEWRIGHT_QQQQQQQ": "1"}, None, "config show' lists them"),
        ({**OIDC, "STAGEWRIGHT_OIDC_ISSUR": "x"}, None, "did you mean STAGEWRIGHT_OIDC_ISSUER"),
        (None, "prot = 1", "settings.toml: prot is not a setting; did you mean port"),
        (None, '[oidc]\nisuer = "x"', "oidc.isuer is not a setting; did you mean oidc.issuer"),
        (None, "[porcelain]\nx = 1", "porcelain.x is not a setting"),
        (None, "host = \n", "settings.toml is not TOML: .*line 1"),
        (None, 'port = "x"', "port in .*settings.toml: it is not a whole number"),
        ({"STAGEWRIGHT_PORT": "x"}, None, "STAGEWRIGHT_PORT: it is not a whole number"),
        ({"STAGEWRIGHT_PORT": "65536"}, None, "STAGEWRIGHT_PORT: it is too large: at most 65535"),
        ({"STAGEWRIGHT_PORT": "tcp://10.0.0.1:8000"}, None, "enableServiceLinks: false"),
        ({"STAGEWRIGHT_SERVICE_HOST": "10.0.0.1"}, None, "enableServiceLinks: false"),
        ({"STAGEWRIGHT_PORT_8000_TCP_ADDR": "10.0.0.1"}, None, "enableServiceLinks: false"),
        ({"STAGEWRIGHT_LOG_FORMAT": "xml"}, None, "STAGEWRIGHT_LOG_FORMAT: .*'json'"),
        ({"STAGEWRIGHT_METRICS_LISTEN": "9464"}, None, "METRICS_LISTEN"),
        ({"STAGEWRIGHT_GRACE_S": "nan"}, None, "GRACE_S"),
        ({**OIDC, "STAGEWRIGHT_OIDC_AUDIENCE": ""}, None, "OIDC_AUDIENCE: is empty"),
        ({**OIDC, "STAGEWRIGHT_OIDC_JWKS_URL": "http://id.example/k"}, None, "JWKS_URL: .*https"),
        ({**OIDC, "STAGEWRIGHT_OIDC_JWKS_URL": "file://localhost/k"}, None, "JWKS_URL: .*https"),
        ({**OIDC, "STAGEWRIGHT_OIDC_ALGORITHMS": "none"}, None, "OIDC_ALGORITHMS: takes some of"),
        ({**OIDC, "STAGEWRIGHT_OIDC_ALGORITHMS": "RS256,HS256"}, None, "takes some of"),
        ({**OIDC, "STAGEWRIGHT_OIDC_ALGORITHMS": ""}, None, "OIDC_ALGORITHMS: is empty"),
        ({**OIDC, "STAGEWRIGHT_OIDC_REQUESTS_PER_MINUTE": "0"}, None, "REQUESTS_PER_MINUTE"),
    ],
)  # fmt: skip
def test_what_is_unknown_or_does_not_fit_is_refused_by_name(said, variables, file, says):
    with pytest.raises(InvalidInput, match=says):
        said(variables, file)


@pytest.mark.parametrize("missing", OIDC)
def test_a_section_is_whole_or_not_there(said, missing):
    some = {name: text for name, text in OIDC.items() if name != missing}
    with pytest.raises(InvalidInput, match=f"{missing} is missing beside {min(some)}"):
        said(some)


def test_lists_are_words_with_commas_in_a_variable_and_lists_in_a_file(said):
    variables = {**OIDC, "STAGEWRIGHT_OIDC_ALGORITHMS": "ES256, EdDSA"}
    settings = said(variables, 'allowed_hosts = ["a.example", "b.example"]').settings
    assert settings.oidc.algorithms == ("ES256", "EdDSA")
    assert settings.allowed_hosts == {"a.example", "b.example"}
    variables = {**OIDC, "STAGEWRIGHT_OIDC_REQUESTS_PER_MINUTE": "60",
                 "STAGEWRIGHT_OIDC_UNFINISHED_JOBS": "0"}  # fmt: skip
    quotas = said(variables).settings.oidc.quotas
    assert (quotas.max_requests_per_minute, quotas.max_unfinished_jobs) == (60, 0)


def test_days_may_be_never(said):
    assert said({"STAGEWRIGHT_KEEP_JOBS_DAYS": "never"}).settings.keep_jobs_days is None
    assert said(None, "keep_audit_days = 90").settings.keep_audit_days == 90


def test_secrets_come_from_files_of_their_own(said, tmp_path):
    (tmp_path / "token").write_text("from-a-file\n")
    (tmp_path / "password").write_text("p@ss/word")
    variables = {
        "STAGEWRIGHT_TOKEN_FILE": str(tmp_path / "token"),
        "STAGEWRIGHT_DATABASE": "postgresql://user@db:5432/plans",
        "STAGEWRIGHT_DATABASE_PASSWORD_FILE": str(tmp_path / "password"),
    }
    configuration = said(variables)
    assert configuration.settings.token == "from-a-file"
    assert configuration.origins["token"] == Origin("file", str(tmp_path / "token"))
    from stagewright.api.store.database import database_url

    assert database_url(configuration.settings.database).password == "p@ss/word"
    for text in ("from-a-file", "p@ss", "p%40ss"):
        assert text not in repr(configuration.settings)


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"STAGEWRIGHT_TOKEN_FILE": "nowhere"}, "cannot read the secret in nowhere"),
        ({"STAGEWRIGHT_TOKEN_FILE": "empty"}, "one secret on one line"),
        ({"STAGEWRIGHT_TOKEN_FILE": "two"}, "one secret on one line"),
        ({"STAGEWRIGHT_TOKEN_FILE": "one", "STAGEWRIGHT_TOKEN": "other-token"}, "one of the two"),
        ({"STAGEWRIGHT_DATABASE_PASSWORD_FILE": "one"}, "postgresql://user@host"),
        ({"STAGEWRIGHT_DATABASE_PASSWORD_FILE": "one",
          "STAGEWRIGHT_DATABASE": "postgresql://u:other@h/n"}, "already has a password"),
    ],
)  # fmt: skip
def test_secret_files_that_do_not_fit_are_refused(said, monkeypatch, tmp_path, variables, says):
    monkeypatch.chdir(tmp_path)
    for name, text in (("empty", "\n"), ("two", "a\nb"), ("one", "the-secret")):
        (tmp_path / name).write_text(text)
    with pytest.raises(InvalidInput, match=says) as refused:
        said(variables)
    assert "the-secret" not in str(refused.value)
    assert "other" not in str(refused.value)


def test_no_refusal_repeats_a_secret(said):
    """Neither pydantic's message nor the chain of causes."""
    with pytest.raises(InvalidInput) as refused:
        said(None, 'token = ["hunter22"]\n')
    assert "hunter22" not in str(refused.value)
    assert refused.value.__suppress_context__


def test_every_setting_says_what_it_means_and_has_one_variable():
    settings = setting_names()
    assert all(len(setting.help) > 15 for setting in settings), settings
    assert len({setting.variable for setting in settings}) == len(settings)
    assert [setting.name for setting in settings if setting.is_secret] == ["token", "session_key"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://user:secret@host/name", "postgresql://user:********@host/name"),
        ("postgresql://user:se@cr/et@host/name", "postgresql://user:********@host/name"),
        ("postgresql://h/n?user=u&password=secret&x=1", "postgresql://h/n?user=u&password=********&x=1"),
        ("postgresql://user@host/name", "postgresql://user@host/name"),
        ("stagewright.db", "stagewright.db"),
        ("at http://a:b/ and http://u:p@h", "at http://a:b/ and http://u:********@h"),
    ],
)  # fmt: skip
def test_passwords_of_urls_are_hidden(text, shown):
    assert without_passwords(text) == shown


def test_every_setting_is_written_down(repository):
    page = (repository / "docs" / "service" / "operations.md").read_text()
    path = repository / "scripts" / "write_settings.py"
    script = module_from_spec(spec := spec_from_file_location("write_settings", path))
    spec.loader.exec_module(script)
    assert script.written(page) == page, "run: .venv/bin/python scripts/write_settings.py"


def test_the_file_in_the_documentation_is_one(said, repository, tmp_path):
    page = (repository / "docs" / "service" / "operations.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "secret").write_text("a-secret")
    settings = said(None, re.sub(r"/run/secrets/\w+", str(tmp_path / "secret"), example)).settings
    assert (settings.token, settings.grace_s) == ("a-secret", 30)
    assert settings.oidc.issuer == "https://id.example"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_the_certificates_in_the_documentation_can_be_made(repository, tmp_path):
    page = (repository / "docs" / "service" / "operations.md").read_text()
    (commands,) = re.findall(r"```sh\n(mkdir -m 700 tls.*?)```", page, re.DOTALL)
    subprocess.run(["sh", "-euc", commands], cwd=tmp_path, check=True, capture_output=True)
    for end in ("api", "scheduler", "worker"):
        context = ssl.create_default_context(cafile=tmp_path / "tls" / "ca.pem")
        context.load_cert_chain(tmp_path / "tls" / f"{end}.pem")
        verify = ["openssl", "verify", "-CAfile", "ca.pem", f"{end}.crt"]
        subprocess.run(verify, cwd=tmp_path / "tls", check=True, capture_output=True)


def test_every_limit_has_a_default():
    settings = ServerSettings(token="x" * 32)
    limits = {name: getattr(settings, name) for name in ServerSettings.model_fields}
    limits = {name: limit for name, limit in limits.items() if re.match("(key|project)_", name)}
    assert set(limits) >= {
        "key_requests_per_minute", "project_requests_per_minute",
        "key_unfinished_jobs", "project_unfinished_jobs", "project_stored_bytes",
    }  # fmt: skip
    assert None not in limits.values()
