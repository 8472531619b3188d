"""Server process: settings, socket, signals, graceful shutdown."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import logging
import re
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from ..core.errors import InvalidInput, Refused
from .app import create_app
from .http.examples import measure_example
from .middleware.graceful_shutdown import GracefulShutdown
from .middleware.header_timeout import HeaderTimeoutProtocol
from .model_sources.measure import choose_sandbox
from .settings.load import Configuration, configure
from .settings.settings import LOOPBACK_NAMES, ServerSettings
from .store.database import IN_MEMORY, database_url, utc_now
from .store.store import Store
from .telemetry.logs import configure_logging, is_for_people
from .telemetry.metrics import Metrics
from .telemetry.tracing import configure_tracing

TOKEN_VARIABLE = "STAGEWRIGHT_TOKEN"

MIN_CLOSING_S = 0.5
"""Time that connections get to close, even after the grace period."""

GARBAGE_AFTER = 20_000
"""Allocations between garbage collections: some hundred requests."""

FORCED_S = 2.0
"""Time that the application gets to end its processes after a second signal."""

SHORT_TOKEN = 16
"""Shorter chosen tokens can be guessed: people choose words."""

_log = logging.getLogger(__name__)


def serve(
    *,
    host: str | None = None,
    port: int | None = None,
    database: str | Path | None = None,
    token: str | None = None,
    config: str | Path | None = None,
    **flags: Any,
) -> None:
    """Serve until SIGINT or SIGTERM, then shut down gracefully and return.

    Once the server accepts requests, the first line on stdout is
    ``{"url": "...", "token": "..."}``, with the token only if it was generated. Text for people is
    on stderr.

    Settings not given here come from the environment's ``STAGEWRIGHT_*`` variables, the settings
    file, and the defaults of `settings.ServerSettings`, in this order.

    Args:
        host: Address or name to listen on.
        port: 0 takes a free port.
        database: The SQLite file, ``:memory:``, or ``postgresql://user:password@host/name``.
        token: Bearer token; by default one is generated on a loopback address.
        config: A settings file, in TOML.
        flags: Other settings by name.

    Raises:
        Refused: The address is not a loopback one, and there is no token, no API key and no
            identity provider (``STAGEWRIGHT_OIDC_*``).
        InvalidInput: A setting is unknown or invalid, the token cannot be sent in a header, the
            address is taken, or the database is unusable.
        StoreUnavailable: The database does not answer.
        KeyboardInterrupt: A second signal cut the graceful shutdown short.
    """
    given = {
        **flags,
        "host": host,
        "port": port,
        "database": None if database is None else str(database),
        "token": token,
    }
    configuration = configure(given, file=config)
    settings = complete_settings(configuration)
    is_generated = configuration.settings.token is None
    run(settings, settings.host, settings.port, token_is_generated=is_generated)


def complete_settings(configuration: Configuration) -> ServerSettings:
    """Return the settings with the defaults that depend on the address: token and host names.

    Raises:
        Refused: The server would be reachable from other machines, and no client could sign in.
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
            f"{settings.host} can be reached from other machines. Set a token in {TOKEN_VARIABLE}, "
            "create a key with 'stagewright keys create', or listen on 127.0.0.1."
        )
    generated = secrets.token_urlsafe(32) if loopback else None
    changed: dict[str, Any] = {
        "token": generated if settings.token is None else _checked_token(settings.token)
    }
    if configuration.origins["allowed_hosts"].kind == "default":
        changed["allowed_hosts"] = LOOPBACK_NAMES | {settings.host.lower()} if loopback else None
    return settings.model_copy(update=changed)


def run(
    settings: ServerSettings, host: str, port: int, *, token_is_generated: bool = False
) -> None:
    """Serve with these settings; see `serve`."""
    listening = _listen(host, port)
    address = f"[{host}]" if ":" in host else host
    url = f"http://{address}:{listening.getsockname()[1]}"
    for_people = is_for_people(settings.log_format, sys.stderr)
    configure_logging(settings.log_format, settings.log_level, secrets=_secrets(settings))
    end_tracing = configure_tracing()
    if settings.token is not None and len(settings.token) < SHORT_TOKEN:
        _log.warning(
            "the token has %d characters and can be guessed; use at least %d, e.g. the output of "
            "python -c 'import secrets; print(secrets.token_urlsafe())'",
            len(settings.token),
            SHORT_TOKEN,
        )
    try:
        shutdown = GracefulShutdown(delay_s=settings.drain_delay_s, grace_s=settings.grace_s)
        app = create_app(settings, shutdown=shutdown)
        config = uvicorn.Config(
            app,
            # h11 is what `make hostile` is tried on; other parsers accept more.
            http=HeaderTimeoutProtocol,
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
        )
        token = settings.token if token_is_generated else None
        # In a thread: it starts a program to find a sandbox, and warns where there is none.
        if settings.sandbox == "auto":
            threading.Thread(target=choose_sandbox, args=("auto",), daemon=True).start()
        with _signals_end_quietly(), _metrics_listener(settings, app.state.metrics):
            server = _Server(config, lambda: announce(url, token, for_people=for_people), shutdown)
            _tune_garbage_collection()
            server.run(sockets=[listening])
    finally:
        listening.close()
        end_tracing()
    if server.force_exit:
        raise KeyboardInterrupt


def announce(url: str, token: str | None, *, for_people: bool = True) -> None:
    """Announce the address, and the token if it was generated: JSON on stdout, text on stderr."""
    sys.stdout.write(json.dumps({"url": url, "token": token}) + "\n")
    sys.stdout.flush()
    if not for_people:
        _log.info("serving", extra={"url": url})
        return
    chosen = "the one you chose, an API key, or a token of the identity provider"
    sys.stderr.write(f"serving on {url}\ntoken: {chosen if token is None else token}\n")
    # The part after "#" stays in the browser: it is in no request line, and so in no log.
    page = f"{url}/sign-in" + (f"#token={token}" if token else "")
    sys.stderr.write(f"plans in a browser: {page}\n")
    token = token or "TOKEN"
    sys.stderr.write(
        "next: measure and plan a small model\n"
        f"  curl -H 'Authorization: Bearer {token}' -H 'Content-Type: application/json' \\\n"
        f"    -d '{json.dumps(measure_example())}' {url}/v1/plans\n"
    )
    sys.stderr.flush()


def _has_keys(database: str) -> bool:
    """Return True if the database has a valid API key; a missing database is not created."""
    if database == IN_MEMORY or ("://" not in database and not Path(database).is_file()):
        return False
    store = Store(database)
    try:
        keys = [key for project in store.projects.list() for key in store.keys.list(project.id)]
    finally:
        store.close()
    now = utc_now()
    return any(
        key.revoked_at is None and (key.expires_at is None or key.expires_at > now) for key in keys
    )


def is_loopback(host: str) -> bool:
    """Return True for an address that only this machine can reach."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class _Server(uvicorn.Server):
    """Server that announces itself, shuts down gracefully at a signal, and ends at the second."""

    def __init__(
        self, config: uvicorn.Config, on_started: Callable[[], None], shutdown: GracefulShutdown
    ) -> None:
        super().__init__(config)
        self._on_started = on_started
        self._shutdown = shutdown
        self._num_signals = 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Count the signal."""
        # No more than that: it runs between any two instructions, perhaps in a write to the log.
        self._num_signals += 1

    async def on_tick(self, counter: int) -> bool:
        if self._num_signals:
            self._shutdown.begin()
            self.force_exit = self._num_signals > 1
            self.should_exit = self.force_exit or await self._shutdown.step()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._shutdown.refuse()
        # uvicorn calls on_tick no more from here on, so a second signal needs a task to notice it.
        watching = asyncio.create_task(self._watch_signals())
        # uvicorn declares an int and hands it to asyncio, which takes a float.
        self.config.timeout_graceful_shutdown = max(MIN_CLOSING_S, self._shutdown.grace_left_s)  # type: ignore[assignment]
        await super().shutdown(sockets)
        watching.cancel()
        if self.force_exit:  # uvicorn then skips the lifespan, and its processes would live on
            with suppress(TimeoutError):
                async with asyncio.timeout(FORCED_S):
                    await self.lifespan.shutdown()

    async def _watch_signals(self) -> None:
        while not self.force_exit:
            await asyncio.sleep(0.05)
            self.force_exit = self._num_signals > 1


def _tune_garbage_collection() -> None:
    """Exempt the objects alive now from garbage collection, and collect less often."""
    # Modules and schemas are a hundred thousand objects, traversed again and again under load.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_AFTER)


@contextmanager
def _metrics_listener(settings: ServerSettings, metrics: Metrics) -> Iterator[None]:
    """Serve metrics on a separate address, if the settings name one."""
    if settings.metrics_listen is None:
        yield
        return
    try:
        stop = metrics.listen(settings.metrics_listen)
    except (OSError, OverflowError) as error:
        raise InvalidInput(
            f"Cannot listen on {settings.metrics_listen} for metrics: {error}"
        ) from None
    try:
        yield
    finally:
        stop()


def _secrets(settings: ServerSettings) -> tuple[str, ...]:
    """Return the texts that are masked in the log."""
    password = database_url(settings.database).password
    return tuple(text for text in (settings.token, settings.session_key, password) if text)


@contextmanager
def _signals_end_quietly() -> Iterator[None]:
    """Ignore the signal that uvicorn raises again after it has shut down."""
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
    # Bound here and not by uvicorn, so that a taken address is our error, and port 0 is known.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise InvalidInput(_explain_refused_address(host, port, error)) from None
    return listening


def _explain_refused_address(host: str, port: int, error: OSError | OverflowError) -> str:
    if not isinstance(error, OSError):
        return f"Cannot listen on {host} port {port}: ports go from 0 to 65535."
    if error.errno != errno.EADDRINUSE:
        return f"Cannot listen on {host} port {port}: {error.strerror or error}."
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as found:
        found.bind((host, 0))
        free = found.getsockname()[1]
    return f"Port {port} of {host} is in use by another program; port {free} is free: --port {free}"


def _checked_token(token: str) -> str:
    """Return the token if a header can carry it (RFC 6750, section 2.1)."""
    if re.fullmatch(r"[A-Za-z0-9._~+/-]{8,}=*", token) is None:
        raise InvalidInput(
            "A token has at least 8 characters: letters, digits and -._~+/, with = only at its end."
        )
    return token
