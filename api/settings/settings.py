"""Settings of a server, as one value; `load` reads them.

A field is a setting: the variable ``STAGEWRIGHT_`` with its name in upper case, and its name in the
file. A field that is a record is a section: ``STAGEWRIGHT_OIDC_ISSUER``, and ``issuer`` below
``[oidc]``. To add one, add a field with a ``description``; docs/operations.md lists them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field

from ...core.document import Record
from .oidc import OidcSettings
from .types import SECRET, Days, NameSet, Words

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
"""Names by which browsers on this machine may address a loopback server."""

PREFIX = "STAGEWRIGHT_"
"""Prefix of every variable."""

DATABASE_VARIABLE = PREFIX + "DATABASE"
"""The variable that names the database for commands without the flag; it may hold a password."""

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
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    token: str | None = Field(
        None,
        repr=False,
        json_schema_extra=SECRET,
        description="The operator's bearer token, which may do everything in the default project. "
        "Without one, keys or an identity provider's tokens have to do; on a loopback address one "
        "is made up.",
    )
    token_file: Path | None = Field(
        None, description="A file with the token, such as a secret that is mounted."
    )
    session_key: str | None = Field(
        None,
        repr=False,
        json_schema_extra=SECRET,
        description="Signs the session cookies of browsers. Servers behind one address share it; "
        "without one, sessions end with the process.",
    )
    session_key_file: Path | None = Field(
        None, description="A file with the session key, such as a secret that is mounted."
    )
    database: str = Field(
        "stagewright.db",
        min_length=1,
        repr=False,
        description="SQLite file, `:memory:`, or `postgresql://user:password@host:port/name`.",
    )
    database_password_file: Path | None = Field(
        None, description="A file with the password that the database's URL leaves out."
    )
    allowed_hosts: NameSet | None = Field(
        LOOPBACK_NAMES,
        description="Names accepted in the `Host` header. By default those of this machine on a "
        "loopback address, and all on another.",
    )
    max_body_bytes: int = Field(
        16 * 2**20, ge=1, description="A longer request body is refused (413)."
    )
    measure_deadline_s: float = Field(300.0, gt=0, description="Longest one measurement may take.")
    plan_deadline_s: float = Field(
        20.0,
        gt=0,
        description="Longest one request may search for a plan; a request may ask for less.",
    )
    plan_processes: int = Field(
        2,
        ge=0,
        description="Processes that search for plans, and one more for what is short; 0 takes "
        "threads of the server's own.",
    )
    log_format: Literal["auto", "json", "console"] = Field(
        "auto",
        description="How the log on stderr is written: JSON lines, or for people. `auto` is for "
        "people on a terminal, else JSON.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="The least that is logged; health checks are `debug`."
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
        description="After a signal, how long `/readyz` says no before requests are refused: "
        "what a load balancer needs to notice.",
    )
    grace_s: float = Field(
        5.0, ge=0, description="After that, how long requests in flight may go on."
    )
    oidc: OidcSettings | None = Field(
        None, description="Whose tokens are taken beside API keys; see docs/access.md."
    )
    sandbox: Literal["auto", "required", "off"] = Field(
        "auto",
        description="Whether children that estimate and measure have no network and write no "
        "files, by bubblewrap: where it works, always (else the server does not start), or never.",
    )
    child_memory_bytes: int | None = Field(
        None,
        ge=2**28,
        description="Most memory such a child may keep; by default three quarters of the "
        "machine's.",
    )
    factories_file: Path | None = Field(
        None,
        description="TOML file with models that may be asked for by name; see docs/service.md.",
    )
    allow_code: bool = Field(
        False,
        description="Measure code of those with the scope `code`, in a sandbox that is tried out "
        "first; where it does not hold, the server does not start.",
    )
    scheduler: str = Field(
        "embedded",
        min_length=1,
        description="What runs jobs: `embedded` (a Dask worker below the server), `threads` (of "
        "the server, without Dask), or the address of a scheduler, `tls://host:8786`.",
    )
    scheduler_tls: TlsFiles | None = Field(
        None, description="Certificates for that scheduler; see docs/jobs.md."
    )
    job_deadline_s: float = Field(
        86400.0, gt=0, description="How long after it was handed in a job has to have ended."
    )
    job_attempts: int = Field(
        5, ge=1, le=100, description="A job whose worker was lost so often is given up."
    )
    job_silence_s: float = Field(
        15.0, ge=1, description="A worker that says nothing for so long is taken for dead."
    )
    keep_jobs_days: Days = Field(
        30.0,
        ge=0,
        description="Jobs that ended longer ago are removed, or `never`; what they made stays.",
    )
    keep_audit_days: Days = Field(
        None, ge=0, description="Lines of the audit log that are older are removed, if given."
    )
    measure_command: Words = Field(MEASURE_COMMAND, description="Program that measures.")
    estimate_command: Words = Field(ESTIMATE_COMMAND, description="Program that estimates.")
