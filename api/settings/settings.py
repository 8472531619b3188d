"""Settings of a server, as one value; `load` reads them.

A field is a setting: the variable ``STAGEWRIGHT_`` with its name in upper case, and its name in the
file. A field that is a record is a section: ``STAGEWRIGHT_OIDC_ISSUER``, and ``issuer`` below
``[oidc]``. To add one, add a field with a ``description``; docs/service/operations.md lists them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, ConfigDict, Field, field_validator

from ...core.document import Record
from ..store.records import Quotas

SECRET: dict[str, Any] = {"secret": True}
"""``json_schema_extra`` of a secret setting."""


def _split(value: Any) -> Any:
    """Return the items of a comma-separated text, and any other value unchanged."""
    if isinstance(value, str):
        return tuple(word.strip() for word in value.split(",") if word.strip())
    return value


Words = Annotated[tuple[str, ...], BeforeValidator(_split)]
"""List in TOML, comma-separated in a variable."""

NameSet = Annotated[frozenset[str], BeforeValidator(_split)]
"""Set of names, written like `Words`."""

Days = Annotated[float | None, BeforeValidator(lambda days: None if days == "never" else days)]
"""Number of days, or ``never``."""

Quota = Annotated[
    int | None, BeforeValidator(lambda number: None if number == "unlimited" else number)
]
"""Positive number, or ``unlimited``."""


ALGORITHMS = (
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA",
)  # fmt: skip
"""Algorithms that may be configured, all asymmetric. Never ``none``, and never HMAC, whose secret
would be the public key that anyone can fetch."""

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
"""Names by which browsers on this machine may address a loopback server."""


class OidcSettings(Record):
    """Issuer, audience, keys and claims of an OpenID Connect provider's tokens."""

    issuer: str = Field(min_length=1, description="Exact value required of `iss`.")
    audience: str = Field(
        min_length=1,
        description="Value required in `aud`: the provider's name for this service.",
    )
    jwks_url: str = Field(
        description="Address of the provider's public keys: `jwks_uri` of its "
        "`/.well-known/openid-configuration`; https, or http on this machine."
    )
    algorithms: Words = Field(
        ("RS256", "ES256", "EdDSA"), min_length=1, description="Accepted signature algorithms."
    )
    scopes_claim: str = Field(
        "scope",
        min_length=1,
        description="The claim with `stagewright:read`, `stagewright:plan` and so on, as a list "
        "or words.",
    )
    project_claim: str = Field(
        "stagewright_project",
        min_length=1,
        description="The claim with the project's id, as shown by `keys list --json`.",
    )
    project: str | None = Field(
        None, description="Project of tokens without that claim; by default they are refused."
    )
    requests_per_minute: int | None = Field(
        None, ge=1, description="Quota per subject; by default `key_requests_per_minute`."
    )
    unfinished_jobs: int | None = Field(
        None, ge=0, description="Quota per subject; by default `key_unfinished_jobs`."
    )

    @field_validator("algorithms")
    @classmethod
    def _are_safe(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        if set(given) - set(ALGORITHMS):
            raise ValueError(f"takes some of {','.join(ALGORITHMS)}, not {','.join(given)!r}")
        return given

    @field_validator("jwks_url")
    @classmethod
    def _is_safe(cls, given: str) -> str:
        url = urlsplit(given)
        if not url.hostname or not (
            url.scheme == "https" or (url.scheme == "http" and url.hostname in LOOPBACK_NAMES)
        ):
            raise ValueError(f"is an https address, not {given!r}")
        return given

    @property
    def quotas(self) -> Quotas:
        return Quotas(
            max_requests_per_minute=self.requests_per_minute,
            max_unfinished_jobs=self.unfinished_jobs,
        )


PREFIX = "STAGEWRIGHT_"
"""Prefix of every variable."""

MEASURE_COMMAND = (sys.executable, "-P", "-m", "stagewright.profiler.measure_worker")
"""Command of the measuring child. ``-P`` keeps the working directory out of its import path."""


ESTIMATE_COMMAND = (sys.executable, "-P", "-m", "stagewright.profiler.estimates.worker")
"""Command of the estimating child."""


class TlsFiles(Record):
    """Certificates that a scheduler, its workers and its servers present to each other."""

    ca_file: str = Field(min_length=1, description="The authority that signed all certificates.")
    cert: str = Field(min_length=1, description="This end's certificate.")
    key: str | None = Field(None, description="Its private key, unless the same file has it.")


class ServerSettings(Record):
    """Configuration of one server."""

    model_config = ConfigDict(hide_input_in_errors=True)

    host: str = Field("127.0.0.1", min_length=1, description="Address or name to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free port.")
    token: str | None = Field(
        None,
        repr=False,
        json_schema_extra=SECRET,
        description="The operator's bearer token, which may do everything in the default project. "
        "Without one, clients need keys or an identity provider's tokens; on a loopback address "
        "one is generated.",
    )
    token_file: Path | None = Field(None, description="File with the token, e.g. a mounted secret.")
    session_key: str | None = Field(
        None,
        repr=False,
        json_schema_extra=SECRET,
        description="Signs the session cookies of browsers. Servers behind one address share it; "
        "without one, sessions end with the process.",
    )
    session_key_file: Path | None = Field(
        None, description="File with the session key, e.g. a mounted secret."
    )
    database: str = Field(
        "stagewright.db",
        min_length=1,
        repr=False,
        description="SQLite file, `:memory:`, or `postgresql://user:password@host:port/name`.",
    )
    database_password_file: Path | None = Field(
        None, description="File with the password, if the database's URL has none."
    )
    allowed_hosts: NameSet | None = Field(
        LOOPBACK_NAMES,
        description="Names accepted in the `Host` header. By default those of this machine on a "
        "loopback address, and all on any other.",
    )
    max_body_bytes: int = Field(
        16 * 2**20, ge=1, description="Longest request body; longer ones are refused (413)."
    )
    measure_deadline_s: float = Field(300.0, gt=0, description="Longest time for one measurement.")
    plan_deadline_s: float = Field(
        20.0,
        gt=0,
        description="Longest time to search for a plan; a request may ask for less.",
    )
    plan_processes: int = Field(
        2,
        ge=0,
        description="Searches of over 0.5 s at once, and one more of shorter ones, each in a "
        "process; one more does other work. 0 uses threads of the server, which no deadline ends.",
    )
    log_format: Literal["auto", "json", "console"] = Field(
        "auto",
        description="Format of the log on stderr: JSON lines, or text for people. `auto` is "
        "text on a terminal, else JSON.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest level logged; health checks are `debug`."
    )
    metrics_listen: str | None = Field(
        None,
        pattern=r"^(\[[0-9A-Fa-f:.]+\]|[^:\s]+):\d{1,5}$",
        description="`host:port` of a listener that answers metrics without a token, such as "
        "`127.0.0.1:9464`. Beside it, `/metrics` is open to the scope `metrics`.",
    )
    drain_delay_s: float = Field(
        0.0,
        ge=0,
        description="Time after a signal in which `/readyz` fails but requests are still answered, "
        "for load balancers to notice.",
    )
    grace_s: float = Field(5.0, ge=0, description="Time that requests in flight have after that.")
    oidc: OidcSettings | None = Field(
        None,
        description="Identity provider whose tokens are accepted, too; see docs/service/access.md.",
    )
    sandbox: Literal["auto", "required", "off"] = Field(
        "auto",
        description="Sandbox of estimating and measuring children, by bubblewrap, without network "
        "and writable files: where it works, always (else the server does not start), or never.",
    )
    child_memory_bytes: int | None = Field(
        None,
        ge=2**28,
        description="Memory limit of such a child; by default three quarters of the machine's.",
    )
    factories_file: Path | None = Field(
        None,
        description="TOML file with models available by name; see docs/service/requests.md.",
    )
    scheduler: str = Field(
        "embedded",
        min_length=1,
        description="Backend of jobs: `embedded` (a Dask worker below the server), `threads` (of "
        "the server, without Dask), or the address of a scheduler, `tls://host:8786`.",
    )
    scheduler_tls: TlsFiles | None = Field(
        None, description="Certificates for that scheduler; see docs/service/jobs.md."
    )
    job_deadline_s: float = Field(
        86400.0, gt=0, description="Longest time from submission to the end of a job."
    )
    job_attempts: int = Field(
        5, ge=1, le=100, description="Attempts before a job whose workers are lost fails."
    )
    job_silence_s: float = Field(
        15.0, ge=1, description="A worker without heartbeats for this long is considered lost."
    )
    key_requests_per_minute: Quota = Field(
        1200, ge=1, description="Requests of a key whose own quota says nothing, or `unlimited`."
    )
    project_requests_per_minute: Quota = Field(
        6000, ge=1, description="Requests of all keys of a project, or `unlimited`."
    )
    key_unfinished_jobs: Quota = Field(
        100, ge=0, description="Unfinished jobs of a key whose own quota says nothing."
    )
    project_unfinished_jobs: Quota = Field(
        500, ge=0, description="Unfinished jobs of all keys of a project."
    )
    project_stored_bytes: Quota = Field(
        10 * 2**30,
        ge=0,
        description="Size of a project's documents, and of answers kept for idempotency keys, as "
        "characters of JSON; then nothing more is stored until some are deleted or expire.",
    )
    keep_jobs_days: Days = Field(
        30.0,
        ge=0,
        description="Age at which ended jobs are removed, or `never`; their results stay.",
    )
    keep_audit_days: Days = Field(
        None, ge=0, description="Age at which audit log entries are removed; by default never."
    )
    keep_keys_days: Days = Field(
        90.0, ge=0, description="Age at which revoked and expired API keys are removed, or `never`."
    )
    measure_command: Words = Field(MEASURE_COMMAND, description="Program that measures.")
    estimate_command: Words = Field(ESTIMATE_COMMAND, description="Program that estimates.")
