"""Running the service: an address, a token, and a clean end."""

from __future__ import annotations

import asyncio
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
from .store.database import IN_MEMORY, database_url
from .store.store import Store, utc_now
from .telemetry.logs import configure_logging, is_for_people
from .telemetry.metrics import Metrics
from .telemetry.tracing import configure_tracing

TOKEN_VARIABLE = "STAGEWRIGHT_TOKEN"

MIN_CLOSING_S = 0.5
"""What connections get to close in, also when the grace is over."""

GARBAGE_AFTER = 20_000
"""New objects, before what may be garbage is looked for: some hundred requests."""

FORCED_S = 2.0
"""What the application gets to end its processes in after a second signal."""

SHORT_TOKEN = 16
"""Characters below which a chosen token may be guessed: people choose words."""

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
    """Serve until interrupted (SIGINT, SIGTERM), then drain (see `draining`) and return.

    Once the server accepts requests, the first line on stdout is
    ``{"url": "...", "token": "..."}``, with a token that was made up: one that was chosen is not
    repeated. People read stderr.

    What is not given here is what the environment's ``STAGEWRIGHT_*`` say, then the settings
    file, then the default of `settings.ServerSettings`.

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
        KeyboardInterrupt: A second signal ended it before it had drained.
    """
    said = {
        **flags,
        "host": host,
        "port": port,
        "database": None if database is None else str(database),
        "token": token,
    }
    configuration = configure(said, file=config)
    settings = opened(configuration)
    made_up = configuration.settings.token is None
    run(settings, settings.host, settings.port, made_up=made_up)


def opened(configuration: Configuration) -> ServerSettings:
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


def run(settings: ServerSettings, host: str, port: int, *, made_up: bool = False) -> None:
    """Serve with these settings; see `serve`.

    Args:
        settings: As `opened` gives them.
        host: Address or name to listen on.
        port: 0 takes a free one.
        made_up: Whether nobody knows the token yet.
    """
    listening = _listen(host, port)
    address = f"[{host}]" if ":" in host else host
    url = f"http://{address}:{listening.getsockname()[1]}"
    for_people = is_for_people(settings.log_format, sys.stderr)
    configure_logging(settings.log_format, settings.log_level, secrets=_secrets(settings))
    end_tracing = configure_tracing()
    if settings.token is not None and len(settings.token) < SHORT_TOKEN:
        _log.warning(
            "the token has %d characters and can be guessed; take one of at least %d, e.g. what "
            "python -c 'import secrets; print(secrets.token_urlsafe())' prints",
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
        token = settings.token if made_up else None
        if settings.sandbox == "auto":  # it warns where there is none, found out by a program
            threading.Thread(target=choose_sandbox, args=("auto",), daemon=True).start()
        with _signals_end_quietly(), _metrics_listener(settings, app.state.metrics):
            server = _Server(config, lambda: announce(url, token, for_people=for_people), shutdown)
            _collect_seldom()
            server.run(sockets=[listening])
    finally:
        listening.close()
        end_tracing()
    if server.force_exit:
        raise KeyboardInterrupt


def announce(url: str, token: str | None, *, for_people: bool = True) -> None:
    """Say where the server is: JSON on stdout for programs, the rest on stderr for people.

    Args:
        url: Where.
        token: One that was made up; `None` if those who may know it do.
        for_people: Whether the log is for people, too.
    """
    sys.stdout.write(json.dumps({"url": url, "token": token}) + "\n")
    sys.stdout.flush()
    if not for_people:
        _log.info("serving", extra={"url": url})
        return
    known = "none made up; the one you chose, keys, or the identity provider's tokens open it"
    sys.stderr.write(f"serving on {url}\ntoken: {known if token is None else token}\n")
    # Behind "#" the token stays in the browser: it is in no request line, so in no log.
    page = f"{url}/sign-in" + (f"#token={token}" if token else "")
    sys.stderr.write(f"look at plans in a browser: {page}\n")
    token = token or "TOKEN"
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
    """Whether only this machine can reach a server that listens there."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class _Server(uvicorn.Server):
    """Says when it accepts requests; drains at the first signal, ends at the second."""

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
        """Only counts: it runs between any two steps of the program, in the midst of a write."""
        self._num_signals += 1

    async def on_tick(self, counter: int) -> bool:
        if self._num_signals:
            self._shutdown.begin()
            self.force_exit = self._num_signals > 1
            self.should_exit = self.force_exit or await self._shutdown.step()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._shutdown.refuse()
        watching = asyncio.create_task(self._watch_signals())
        # uvicorn has a whole number here and hands it to asyncio, which takes any.
        self.config.timeout_graceful_shutdown = max(MIN_CLOSING_S, self._shutdown.grace_left_s)  # type: ignore[assignment]
        await super().shutdown(sockets)
        watching.cancel()
        if self.force_exit:  # uvicorn leaves the application as it is, processes and all
            with suppress(TimeoutError):
                async with asyncio.timeout(FORCED_S):
                    await self.lifespan.shutdown()

    async def _watch_signals(self) -> None:
        while not self.force_exit:
            await asyncio.sleep(0.05)
            self.force_exit = self._num_signals > 1


def _collect_seldom() -> None:
    """Leave what lives as long as the server to itself when garbage is looked for.

    Its modules and schemas are a hundred thousand objects, gone over again and again under load.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_AFTER)


@contextmanager
def _metrics_listener(settings: ServerSettings, metrics: Metrics) -> Iterator[None]:
    """Metrics on an address of their own, if the settings name one."""
    if settings.metrics_listen is None:
        yield
        return
    try:
        stop = metrics.listen(settings.metrics_listen)
    except (OSError, OverflowError) as error:
        raise InvalidInput(f"metrics cannot listen on {settings.metrics_listen}: {error}") from None
    try:
        yield
    finally:
        stop()


def _secrets(settings: ServerSettings) -> tuple[str, ...]:
    """What the log never holds."""
    password = database_url(settings.database).password
    return tuple(text for text in (settings.token, settings.session_key, password) if text)


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
