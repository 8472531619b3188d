"""Running the service: an address, a token, and a clean end."""

from __future__ import annotations

import copy
import json
import re
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import uvicorn
import uvicorn.config

from ..core.errors import InvalidInput, Refused
from .app import create_app
from .configuration import Configuration, configure
from .examples import measure_example
from .measuring import Measurer
from .settings import IN_MEMORY, LOOPBACK_NAMES, Settings
from .store.sql_store import SqlStore, utc_now

TOKEN_VARIABLE = "STAGEWRIGHT_TOKEN"
GRACE_S = 5
"""How long requests in flight may go on after a signal; measurements end at once."""


def serve(
    *,
    host: str | None = None,
    port: int | None = None,
    database: str | Path | None = None,
    token: str | None = None,
    config: str | Path | None = None,
    **flags: Any,
) -> None:
    """Serve until interrupted (SIGINT, SIGTERM); then end every measurement and return.

    Once the server accepts requests, the first line on stdout is
    ``{"url": "...", "token": "..."}``. People read stderr.

    What is not given here is what the environment's ``STAGEWRIGHT_*`` say, then the settings
    file, then the default of `settings.Settings`.

    Args:
        host: Address or name to listen on.
        port: 0 takes a free one.
        database: The SQLite file, ``:memory:``, or ``postgresql://user:password@host/name``.
        token: Bearer token; on a loopback address one is made up if there is none.
        config: A settings file, in TOML.
        flags: Other settings by their name.

    Raises:
        Refused: The address is not a loopback one, and there is no token, no API key and no
            identity provider (``STAGEWRIGHT_OIDC_ISSUER`` and its like).
        InvalidInput: A setting is unknown or does not fit, the token cannot be sent in a header,
            the address is taken, or the database cannot be used.
        StoreUnavailable: The database does not answer.
    """
    said = {
        **flags,
        "host": host,
        "port": port,
        "database": None if database is None else str(database),
        "token": token,
    }
    settings = opened(configure(said, file=config))
    run(settings, settings.host, settings.port)


def opened(configuration: Configuration) -> Settings:
    """The settings, with what follows from where the server listens.

    Raises:
        Refused: Anybody could reach it, and nobody would be let in.
        InvalidInput: The token cannot be sent in a header.
    """
    settings = configuration.settings
    loopback = is_loopback(settings.host)
    if (
        settings.token is None
        and not loopback
        and settings.oidc is None
        and not _has_keys(settings.database)
    ):
        raise Refused(
            f"{settings.host} can be reached from other machines; choose a token and give it in "
            f"{TOKEN_VARIABLE}, make a key with 'stagewright keys create', or listen on 127.0.0.1"
        )
    made_up = secrets.token_urlsafe(32) if loopback else None
    changed: dict[str, Any] = {
        "token": made_up if settings.token is None else _checked(settings.token)
    }
    if configuration.origins["allowed_hosts"].kind == "default":
        changed["allowed_hosts"] = LOOPBACK_NAMES | {settings.host.lower()} if loopback else None
    return settings.model_copy(update=changed)


def run(settings: Settings, host: str, port: int) -> None:
    """Serve with these settings; see `serve`."""
    listening = _listen(host, port)
    address = f"[{host}]" if ":" in host else host
    url = f"http://{address}:{listening.getsockname()[1]}"
    try:
        measurer = Measurer.from_settings(settings)
        config = uvicorn.Config(
            create_app(settings, measurer=measurer),
            log_config=_log_to_stderr(),
            server_header=False,
            timeout_graceful_shutdown=GRACE_S,
        )
        with _signals_end_quietly():
            server = _Server(config, lambda: announce(url, settings.token), measurer.stop)
            server.run(sockets=[listening])
    finally:
        listening.close()


def announce(url: str, token: str | None) -> None:
    """Say where the server is: JSON on stdout for programs, the rest on stderr for people."""
    sys.stdout.write(json.dumps({"url": url, "token": token}) + "\n")
    sys.stdout.flush()
    known = "none; keys and tokens of the identity provider open this server"
    sys.stderr.write(f"serving on {url}\ntoken: {known if token is None else token}\n")
    token = token or "KEY"
    sys.stderr.write(
        "next: measure and plan a small model\n"
        f"  curl -H 'Authorization: Bearer {token}' -H 'Content-Type: application/json' \\\n"
        f"    -d '{json.dumps(measure_example())}' {url}/v1/plans\n"
    )
    sys.stderr.flush()


def _has_keys(database: str) -> bool:
    """Whether a key opens the service of a database; makes none."""
    if database == IN_MEMORY or ("://" not in database and not Path(database).is_file()):
        return False
    store = SqlStore(database)
    try:
        keys = [key for project in store.projects.list() for key in store.keys.list(project.id)]
    finally:
        store.close()
    now = utc_now()
    return any(
        key.revoked_at is None and (key.expires_at is None or key.expires_at > now) for key in keys
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens there."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class _Server(uvicorn.Server):
    """Calls back once requests are accepted, and once they are no more."""

    def __init__(
        self,
        config: uvicorn.Config,
        on_started: Callable[[], None],
        on_stopping: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._on_started = on_started
        self._on_stopping = on_stopping

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_stopping()
        await super().shutdown(sockets)


@contextmanager
def _signals_end_quietly() -> Iterator[None]:
    """Uvicorn raises the signal that ended it once more; here that is the end, not an error."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise InvalidInput(f"cannot listen on {host} port {port}: {error}") from None
    return listening


def _checked(token: str) -> str:
    """The token, if it can be carried by a header (RFC 6750, section 2.1)."""
    if re.fullmatch(r"[A-Za-z0-9._~+/-]{8,}=*", token) is None:
        raise InvalidInput(
            "a token has at least 8 characters out of letters, digits and -._~+/, "
            "with = at its end only"
        )
    return token


def _log_to_stderr() -> dict[str, object]:
    """Uvicorn's own logging, kept off stdout."""
    config = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    config["handlers"]["access"]["stream"] = "ext://sys.stderr"
    return config
