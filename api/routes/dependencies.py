"""Dependencies of route handlers: services, requests to create and requests to read.

A request to create is carried out once per idempotency key; a request to read is answered 304
while the client's entity tag is current.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Request, Response
from starlette.concurrency import run_in_threadpool

from ... import __version__
from ..auth.access import CurrentPrincipal, Principal
from ..auth.authenticate import Authenticator
from ..http.disconnect import while_connected
from ..http.field_errors import FieldError
from ..http.preconditions import IfMatch, IfNoneMatch, check_match, has_current
from ..http.problems import PROBLEM_RESPONSE, Problem
from ..http.strict_requests import StrictRoute
from ..jobs.service import JobService
from ..planning.service import Planning
from ..settings.settings import ServerSettings
from ..store.documents import Kind
from ..store.errors import StoreUnavailable
from ..store.idempotency import IdempotencyStore
from ..store.records import Answer
from ..store.store import Store


def strict_router(prefix: str, tag: str) -> APIRouter:
    """Return a router whose routes read bodies strictly and answer errors as problems."""
    return APIRouter(prefix=prefix, tags=[tag], route_class=StrictRoute, responses=PROBLEM_RESPONSE)


def from_state(name: str) -> Any:
    """Return a dependency on the service of this name on ``app.state`` (see `app.create_app`)."""

    # A coroutine: FastAPI runs plain functions in its thread pool, which costs more than the call.
    async def read(request: Request) -> Any:
        return getattr(request.app.state, name)

    return Depends(read)


TheSettings = Annotated[ServerSettings, from_state("settings")]
TheStore = Annotated[Store, from_state("store")]
ThePlanning = Annotated[Planning, from_state("planning")]
TheJobs = Annotated[JobService, from_state("jobs")]
TheAuthenticator = Annotated[Authenticator, from_state("authenticator")]

KEY_HEADER = "Idempotency-Key"
REPLAYED = "Idempotency-Replayed"
REUSED = "Stagewright-Reused"
"""Response header that names the results which were computed earlier."""

OF_BODY = ("content-length", "content-type")
"""Headers that belong to a body, and are made anew with another."""

LEASE_S = 15.0
"""A key is leased while its request is answered, and the lease renewed three times in this time;
the key of a server that dies is free again afterwards."""

REVALIDATED = "private, no-cache"
"""Stored documents never change, but a caller may lose the right to see them."""

IdempotencyKey = Annotated[
    str | None,
    Header(
        description="A unique text of your choice, such as a UUID, for each thing to be created: "
        "a request repeated with the same key within a day gets the first response again and "
        "creates nothing.",
        min_length=1,
        max_length=255,
    ),
]
TAGGED: dict[int | str, dict[str, object]] = {
    304: {"description": "The client's copy is current (If-None-Match)"}
}
"""For the ``responses`` of routes that send an entity tag."""


def created(text: str, location: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return a 201 response with a JSON document and its location."""
    return Response(text, 201, {"Location": location, **(headers or {})}, "application/json")


@dataclass(frozen=True)
class Creation:
    """A request to create something, with its sender."""

    request: Request
    principal: Principal
    idempotency: IdempotencyStore

    @property
    def is_fresh(self) -> bool:
        """Return True if the client wants nothing that was computed earlier."""
        return "no-cache" in self.request.headers.get("cache-control", "").lower()

    @property
    def has_key(self) -> bool:
        """Return True if the client can come back for the response."""
        return KEY_HEADER in self.request.headers

    async def submit_key(self) -> str | None:
        """Return what identifies repeated submissions of one job: key and digest of the body."""
        key = self.request.headers.get(KEY_HEADER)
        if key is None:
            return None
        return f"{key}:{(await self._digest(self.request.url.path))[:24]}"

    async def once(self, make: Callable[[], Awaitable[Response]]) -> Response:
        """Answer the request, or replay the first response if its key was used before.

        Problems are not stored: a request that failed can be repeated with its key. See
        `store.idempotency.IdempotencyStore` for the errors of a key.
        """
        keys = self.request.headers.getlist(KEY_HEADER)
        if not keys:
            return await make()
        if len(keys) > 1:
            detail = f"send one {KEY_HEADER}, not {len(keys)}"
            errors = [FieldError(parameter=KEY_HEADER, detail=detail)]
            raise Problem(422, "invalid-input", detail, errors=errors)
        digest = await self._digest(f"{self.request.method} {self.request.url.path}\n")
        # The holder tells this attempt from a retry that took the key over after the lease ran out.
        project, key, holder = self.principal.project_id, keys[0], secrets.token_hex(16)
        idempotency = self.idempotency
        first = await run_in_threadpool(
            idempotency.claim, project, key, digest, holder=holder, lease_s=LEASE_S
        )
        if first is not None:
            return _replayed(first)
        lease = asyncio.create_task(_renewed(idempotency, project, key, holder))
        try:
            response = await make()
            answer = Answer(
                status=response.status_code,
                headers=tuple(
                    (name, value) for name, value in response.headers.items() if name not in OF_BODY
                ),
                body=bytes(response.body).decode(),
            )
            # Whoever completes first wins: every client is given the response that was stored.
            kept = await run_in_threadpool(
                idempotency.complete, project, key, answer, holder=holder
            )
        except BaseException:  # cancellation too: otherwise retries would wait for the lease
            await run_in_threadpool(idempotency.release, project, key, holder=holder)
            raise
        finally:
            lease.cancel()
        return response if kept == answer else _replayed(kept)

    async def _digest(self, prefix: str) -> str:
        return hashlib.sha256(prefix.encode() + await self.request.body()).hexdigest()


def _replayed(answer: Answer) -> Response:
    headers = {**dict(answer.headers), REPLAYED: "true"}
    return Response(answer.body, answer.status, headers, "application/json")


async def _renewed(idempotency: IdempotencyStore, project: str, key: str, holder: str) -> None:
    while True:
        await asyncio.sleep(LEASE_S / 3)
        with suppress(StoreUnavailable):
            await run_in_threadpool(idempotency.renew, project, key, holder=holder, lease_s=LEASE_S)


async def _creation(
    request: Request,
    principal: CurrentPrincipal,
    store: TheStore,
    idempotency_key: IdempotencyKey = None,
) -> Creation:
    return Creation(request, principal, store.idempotency)


TheCreation = Annotated[Creation, Depends(_creation)]


@dataclass(frozen=True)
class Reading:
    """A request to read an immutable document."""

    request: Request
    principal: Principal
    store: Store

    def document(self, kind: Kind, identifier: str) -> tuple[str, str]:
        """Return the entity tag and the JSON of a stored document. Raises: RecordNotFound."""
        return self.store.documents.tagged_json(kind, self.principal.project_id, identifier)

    def respond(
        self,
        tag: str,
        content: str,
        media_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Return a document, or 304 if the client has it. Tags differ wherever contents do."""
        always = {"ETag": f'"{tag}"', "Cache-Control": REVALIDATED}
        check_match(self.request.headers, tag)
        if has_current(self.request.headers, tag):
            return Response(None, 304, always)
        return Response(content, 200, {**always, **(headers or {})}, media_type)

    async def respond_derived(
        self,
        name: str,
        make: Callable[[], Awaitable[str]],
        media_type: str = "application/json",
        filename: str | None = None,
    ) -> Response:
        """Return a response derived from a document, or 304 if the client has it.

        Its tag is its name and this release, for another release may make it differently. With a
        filename it is sent as a file to be saved.
        """
        tag = f"{name}.{__version__}"
        headers = {}
        if filename is not None:
            headers = {
                # Should a browser show an SVG anyway, it runs no script and is not of this
                # server's origin.
                "Content-Security-Policy": "default-src 'none'; sandbox",
                "Content-Disposition": f'attachment; filename="{filename}"',
            }
        is_known = has_current(self.request.headers, tag)
        content = "" if is_known else await while_connected(self.request.receive, make())
        return self.respond(tag, content, media_type, headers)


async def _reading(
    request: Request,
    principal: CurrentPrincipal,
    store: TheStore,
    if_match: IfMatch = None,
    if_none_match: IfNoneMatch = None,
) -> Reading:
    return Reading(request, principal, store)


TheReading = Annotated[Reading, Depends(_reading)]
