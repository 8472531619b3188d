"""Responses that need not be computed twice: by idempotency key, and by entity tag."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Annotated

from fastapi import Header, Request, Response
from starlette.concurrency import run_in_threadpool

from ... import __version__
from ..auth.access import Principal
from ..http.field_errors import FieldError
from ..http.problems import Problem
from ..store.errors import StoreUnavailable
from ..store.idempotency import IdempotencyStore
from ..store.records import Answer

KEY_HEADER = "Idempotency-Key"
REPLAYED = "Idempotency-Replayed"
REUSED = "Stagewright-Reused"
"""Response header that names the results which were computed earlier."""

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
IfNoneMatch = Annotated[
    str | None,
    Header(description="Entity tags the client has; if one still matches, the response is 304."),
]

TAGGED: dict[int | str, dict[str, object]] = {
    304: {"description": "The client's copy is current (If-None-Match)"}
}
"""For the ``responses`` of routes that send an entity tag."""


def created(text: str, location: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return a 201 response with a JSON document and its location."""
    return Response(text, 201, {"Location": location, **(headers or {})}, "application/json")


async def once(
    idempotency: IdempotencyStore,
    principal: Principal,
    request: Request,
    make: Callable[[], Awaitable[Response]],
) -> Response:
    """Answer a creating request, or replay the first response if its key was used before.

    Problems are not stored: a request that failed can be repeated with its key.

    Raises:
        KeyReused, AnswerPending, InvalidInput: See `store.idempotency.IdempotencyStore`.
    """
    keys = request.headers.getlist(KEY_HEADER)
    if not keys:
        return await make()
    if len(keys) > 1:
        detail = f"send one {KEY_HEADER}, not {len(keys)}"
        errors = [FieldError(parameter=KEY_HEADER, detail=detail)]
        raise Problem(422, "invalid-input", detail, errors=errors)
    digest = await _digest(f"{request.method} {request.url.path}\n", request)
    # The holder tells this attempt from a retry that took the key over after the lease ran out.
    project, key, holder = principal.project_id, keys[0], secrets.token_hex(16)
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
                (name, value)
                for name, value in response.headers.items()
                if name not in ("content-length", "content-type")
            ),
            body=bytes(response.body).decode(),
        )
        # Whoever completes first wins: every client is given the response that was stored.
        kept = await run_in_threadpool(idempotency.complete, project, key, answer, holder=holder)
    except BaseException:  # cancellation too: without the release, retries would wait for the lease
        await run_in_threadpool(idempotency.release, project, key, holder=holder)
        raise
    finally:
        lease.cancel()
    return response if kept == answer else _replayed(kept)


def _replayed(answer: Answer) -> Response:
    headers = {**dict(answer.headers), REPLAYED: "true"}
    return Response(answer.body, answer.status, headers, "application/json")


async def _renewed(idempotency: IdempotencyStore, project: str, key: str, holder: str) -> None:
    while True:
        await asyncio.sleep(LEASE_S / 3)
        with suppress(StoreUnavailable):
            await run_in_threadpool(idempotency.renew, project, key, holder=holder, lease_s=LEASE_S)


async def _digest(prefix: str, request: Request) -> str:
    return hashlib.sha256(prefix.encode() + await request.body()).hexdigest()


def is_fresh(request: Request) -> bool:
    """Return True if the client wants nothing that was computed earlier."""
    return "no-cache" in request.headers.get("cache-control", "").lower()


async def submit_key(request: Request) -> str | None:
    """Return what identifies repeated submissions of one job: the key with a digest of the body."""
    key = request.headers.get(KEY_HEADER)
    return None if key is None else f"{key}:{(await _digest(request.url.path, request))[:24]}"


def tagged(
    request: Request,
    tag: str,
    content: str,
    media_type: str = "application/json",
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return an immutable document, or 304 if the client has it.

    Args:
        request: Its ``If-None-Match`` header is compared.
        tag: Differs wherever the content does.
        content: The document.
        media_type: Media type of the content.
        headers: More headers for a 200.
    """
    always = {"ETag": f'"{tag}"', "Cache-Control": REVALIDATED}
    if _has_current(request, tag):
        return Response(None, 304, always)
    return Response(content, 200, {**always, **(headers or {})}, media_type)


async def tagged_elsewhere(
    request: Request,
    tag: str,
    make: Callable[[], Awaitable[str]],
    media_type: str = "application/json",
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return a document like `tagged`, made only if the client does not have it."""
    content = "" if _has_current(request, tag) else await make()
    return tagged(request, tag, content, media_type, headers)


def of_release(tag: str) -> str:
    """Extend the tag of a derived document by the release: another may derive it differently."""
    return f"{tag}.{__version__}"


def _has_current(request: Request, tag: str) -> bool:
    # Weak tags match too (RFC 9110, section 13.1.2), and proxies that compress make tags weak.
    sent = ",".join(request.headers.getlist("if-none-match")).split(",")
    return bool({f'"{tag}"', "*"} & {entry.strip().removeprefix("W/") for entry in sent})
