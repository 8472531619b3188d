"""Limits on the load of a request: length of its body, time to send it, requests at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...core.units import format_bytes
from ..auth.access import is_open
from ..fair_limits import FairShares
from ..http.json_bodies import explain_archive
from ..http.problems import RETRY_AFTER_S, Problem

MAX_DISCARDED_BYTES = 64 * 2**20
"""Bytes beyond the limit that are still read, so that the client gets to see the answer."""

MAX_OPEN_BYTES = 8 * 2**10
"""Longest body on paths that need no token: a form with a token in it."""

MAX_BODY_S = 120.0
"""Longest a body may take to arrive: 16 MiB at a megabit a second."""

KEY_BYTES = 64 * 2**20
"""Bodies of one key in memory, arriving or being handled."""

ALL_BYTES = 256 * 2**20
"""Bodies of all clients in memory; 40 unfinished uploads once held 600 MB."""

AT_ONCE = 16
"""Four times the threads for the database: some requests search, some write."""

MAX_SLOT_S = 0.25
"""Longest a request keeps its slot; one that searches or measures continues without."""

Count = Callable[[int], None]
"""Counts bytes of a body, or raises the refusal."""


class LoadLimits:
    """Middleware that reads the body, up to a limit, and waits for a slot before passing it on."""

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        max_discarded_bytes: int = MAX_DISCARDED_BYTES,
        max_body_s: float = MAX_BODY_S,
        concurrency: ConcurrencyLimit | None = None,
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_read_bytes = max_bytes + max_discarded_bytes
        self._max_body_s = max_body_s
        self._concurrency = ConcurrencyLimit() if concurrency is None else concurrency
        self._bodies = FairShares(max(KEY_BYTES, max_bytes), max(ALL_BYTES, 4 * max_bytes))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        principal = scope.get("state", {}).get("principal")
        owner, project = ("", "") if principal is None else (principal.owner, principal.project_id)
        # Counted until the answer: handlers keep the body, too.
        with self._bodies.share(owner, project) as share:

            def count(num_bytes: int) -> None:
                if not self._bodies.has_room(owner, project, num_bytes):
                    raise _too_many_bytes(self._bodies)
                share.add(num_bytes)

            await self._pass_on(scope, receive, send, count)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send, count: Count) -> None:

        try:
            body = await self._read_body(scope, receive, count)
        except Problem as problem:
            await problem.response()(scope, receive, send)
            return
        except ClientDisconnect:
            return
        replay = _replay(body, receive)
        if is_open(scope["path"]):  # health checks do not wait behind requests
            await self._app(scope, replay, send)
            return
        # Only now: a client that sends its body slowly must not hold a slot meanwhile.
        async with self._concurrency.slot() as release:
            await self._app(scope, replay, _release_on_stream(send, release))

    async def _read_body(self, scope: Scope, receive: Receive, count: Count) -> bytes:
        """Return the whole body; raise 413 if it is too long, 408 if it takes too long."""
        headers = Headers(scope=scope)
        open_path = is_open(scope["path"])
        max_bytes = min(self._max_bytes, MAX_OPEN_BYTES) if open_path else self._max_bytes
        announced = _announced_bytes(headers)
        expects_continue = headers.get("expect", "").lower() == "100-continue"
        if announced > max_bytes and (expects_continue or announced > self._max_read_bytes):
            raise _too_large(max_bytes, headers)
        try:
            async with asyncio.timeout(self._max_body_s):
                return await self._receive_body(receive, max_bytes, count, headers)
        except TimeoutError:
            raise Problem(
                408,
                "request-timeout",
                f"The body did not arrive within {self._max_body_s:g} s. Send it in one go.",
                headers={"Connection": "close"},
            ) from None

    async def _receive_body(
        self, receive: Receive, max_bytes: int, count: Count, headers: Headers
    ) -> bytes:
        # The bytes that arrive are counted, whatever Content-Length says. An overlong body is read
        # on and discarded: clients send all of it before they read the answer, and closing the
        # connection earlier resets it, so that they would never learn the reason.
        body, num_read, more = bytearray(), 0, True
        while more and num_read <= self._max_read_bytes:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientDisconnect
            chunk = message.get("body", b"")
            num_read += len(chunk)
            more = message.get("more_body", False)
            if num_read > max_bytes:
                count(-len(body))
                body.clear()
            else:
                count(len(chunk))
                body += chunk
        if num_read > max_bytes:
            raise _too_large(max_bytes, headers)
        return bytes(body)


def _too_large(max_bytes: int, headers: Headers) -> Problem:
    announced = _announced_bytes(headers)
    size = f"; this one has {format_bytes(announced)}" if announced else ""
    return Problem(
        413,
        "body-too-large",
        f"A request body may have at most {format_bytes(max_bytes)} ({max_bytes} bytes){size}."
        + explain_archive(headers.get("content-type", "")),
        headers={"Connection": "close"},
    )


def _too_many_bytes(bodies: FairShares) -> Problem:
    return Problem(
        429,
        "too-many-uploads",
        f"Request bodies in flight may have {format_bytes(bodies.for_one)} of one key, "
        f"{format_bytes(bodies.for_project)} of one project and {format_bytes(bodies.for_all)} of "
        "all clients together. Send fewer at once.",
        headers={"Retry-After": str(RETRY_AFTER_S), "Connection": "close"},
    )


def _announced_bytes(headers: Headers) -> int:
    announced = headers.get("content-length", "")
    return int(announced) if announced.isdecimal() and len(announced) < 20 else 0


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that gives the body in one message, and then what else arrives."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay


def _release_on_stream(send: Send, release: Callable[[], None]) -> Send:
    """Release the slot when a stream of events starts, which lasts as long as its reader wants."""

    async def send_and_release(message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = Headers(raw=message.get("headers", [])).get("content-type", "")
            if kind.startswith("text/event-stream"):
                release()
        await send(message)

    return send_and_release


class ConcurrencyLimit:
    """First-in, first-out slots: the number of requests handled at once.

    Without it, every step of a request queues behind the steps of all others, so that a new plan,
    which takes eight steps, waits eight times as long as a list, which takes one. With it each
    request waits once. The figures of docs/evidence/load.md (217 requests a second from 200 clients
    without pauses, 99 of 100 within 1.3 s) were measured with it.
    """

    def __init__(self, at_once: int = AT_ONCE, max_slot_s: float = MAX_SLOT_S) -> None:
        self._max_slot_s = max_slot_s
        self._free = asyncio.Semaphore(at_once)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[Callable[[], None]]:
        """Wait for a slot; the function given releases it early, as do `max_slot_s` seconds."""
        await self._free.acquire()
        is_held = True

        def release() -> None:
            # Called up to three times: by the timer, by a stream's first byte, at the end.
            nonlocal is_held
            if is_held:
                is_held = False
                self._free.release()

        timer = asyncio.get_running_loop().call_later(self._max_slot_s, release)
        try:
            yield release
        finally:
            timer.cancel()
            release()
