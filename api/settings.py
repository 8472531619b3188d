"""What a server is told when it starts, as one value."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from .auth.oidc_settings import OidcSettings

LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})
"""Names a browser on this machine may call a loopback server by."""

DATABASE_VARIABLE = "STAGEWRIGHT_DATABASE"
"""Names the database to the commands that are not told; it may hold a password."""

IN_MEMORY = ":memory:"
"""A database that lives as long as its server."""

MEASURE_COMMAND = (sys.executable, "-P", "-m", "stagewright.profiler.child")
"""The measuring child. ``-P`` keeps the working directory out of its import path."""


ESTIMATE_COMMAND = (sys.executable, "-P", "-m", "stagewright.profiler.estimates.child")
"""The estimating child."""


@dataclass(frozen=True)
class Settings:
    """How one server behaves.

    Attributes:
        token: The operator's bearer token, which may do everything in the default project; `None`
            if there is none, and keys or an identity provider's tokens have to do.
        database: Path of the SQLite file, `IN_MEMORY`, or a URL (see `store.database`).
        allowed_hosts: Names accepted in the ``Host`` header; `None` accepts all.
        max_body_bytes: A longer request body is refused.
        measure_deadline_s: Longest a request may wait for its measurement, queue included.
        plan_deadline_s: Longest one request may search for a plan; a request may ask for less.
        plan_processes: Processes that search for plans; 0 takes threads of the server's own.
        measure_command: Program that measures (see `measuring`).
        estimate_command: Program that estimates (see `models.estimating`).
        oidc: Whose tokens are taken beside API keys; `None` for nobody's.
    """

    token: str | None
    database: str = "stagewright.db"
    allowed_hosts: frozenset[str] | None = LOOPBACK_NAMES
    max_body_bytes: int = 16 * 2**20
    measure_deadline_s: float = 300.0
    plan_deadline_s: float = 20.0
    plan_processes: int = 2
    measure_command: tuple[str, ...] = MEASURE_COMMAND
    estimate_command: tuple[str, ...] = ESTIMATE_COMMAND
    oidc: OidcSettings | None = None
