"""Responses given again: by idempotency key, and by the tag of what is immutable."""

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
from ..auth.principal import Principal
from ..http.field_errors import FieldError
from ..http.problems import Problem
from ..store.base import Idempotency
from ..store.errors import StoreUnavailable
from ..store.records import Answer

KEY_HEADER = "Idempotency-Key"
REPLAYED = "Idempotency-Replayed"
LEASE_S = 15.0
"""Renewed while a request is being answered; a server that dies holds a key no longer."""

REVALIDATED = "private, no-cache"
"""What is stored never changes, but a caller may lose the right to see it."""

IdempotencyKey = Annotated[
    str | None,
    Header(
        description="A new text of your own, such as a UUID, for each thing to be made: the same "
        "request sent again with it within a day gets the first answer again, and makes nothing.",
        min_length=1,
        max_length=255,
    ),
]
IfNoneMatch = Annotated[
    str | None,
    Header(description="Entity tags already held: one that still fits is answered 304."),
]

TAGGED: dict[int | str, dict[str, object]] = {
    304: {"description": "What is held already is still right (If-None-Match)"}
}
"""For the ``responses`` of routes that give an entity tag."""


def created(text: str, location: str, headers: Mapping[str, str] | None = None) -> Response:
    """201 with what was made, as JSON, and where it is."""
    return Response(
        text,
        201,
        {"Location": location, **(headers or {})},
        "application/json",
    )


async def once(
    idempotency: Idempotency,
    principal: Principal,
    request: Request,
    make: Callable[[], Awaitable[Response]],
) -> Response:
    """The answer to a creating request, or the first answer to it if its key was used before.

    Only answers are kept, no problems: a request that failed can be sent again.

    Raises:
        KeyReused, AnswerPending, InvalidInput: See `contract.Idempotency`.
    """
    keys = request.headers.getlist(KEY_HEADER)
    if not keys:
        return await make()
    if len(keys) > 1:
        detail = f"send one {KEY_HEADER}, not {len(keys)}"
        errors = [FieldError(parameter=KEY_HEADER, detail=detail)]
        raise Problem(422, "invalid-input", detail, errors=errors)
    digest = _digest(request, await request.body())
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
        kept = await run_in_threadpool(idempotency.complete, project, key, answer, holder=holder)
    except BaseException:
        await run_in_threadpool(idempotency.release, project, key, holder=holder)
        raise
    finally:
        lease.cancel()
    return response if kept == answer else _replayed(kept)


def _replayed(answer: Answer) -> Response:
    headers = {**dict(answer.headers), REPLAYED: "true"}
    return Response(answer.body, answer.status, headers, "application/json")


async def _renewed(idempotency: Idempotency, project: str, key: str, holder: str) -> None:
    """Keep a key while its answer takes long."""
    while True:
        await asyncio.sleep(LEASE_S / 3)
        with suppress(StoreUnavailable):
            await run_in_threadpool(idempotency.renew, project, key, holder=holder, lease_s=LEASE_S)


def _digest(request: Request, body: bytes) -> str:
    digest = hashlib.sha256(f"{request.method} {request.url.path}\n".encode())
    digest.update(body)
    return digest.hexdigest()


def tagged(
    request: Request,
    tag: str,
    content: Callable[[], str],
    media_type: str = "application/json",
    headers: Mapping[str, str] | None = None,
) -> Response:
    """What is immutable, or 304 if the caller holds it already.

    Args:
        request: Whose ``If-None-Match`` counts.
        tag: Differs wherever the content does.
        content: Called only if it is sent.
        media_type: Of the content.
        headers: More headers of the whole answer.
    """
    always = _always(tag)
    if _is_held(request, tag):
        return Response(None, 304, always)
    return Response(content(), 200, {**always, **(headers or {})}, media_type)


async def tagged_elsewhere(
    request: Request,
    tag: str,
    content: Callable[[], Awaitable[str]],
    media_type: str = "application/json",
    headers: Mapping[str, str] | None = None,
) -> Response:
    """As `tagged`, of content that others make."""
    if _is_held(request, tag):
        return tagged(request, tag, str)
    made = await content()
    return tagged(request, tag, lambda: made, media_type, headers)


def _always(tag: str) -> dict[str, str]:
    return {"ETag": f'"{tag}"', "Cache-Control": REVALIDATED}


def _is_held(request: Request, tag: str) -> bool:
    held = _held(request)
    return f'"{tag}"' in held or "*" in held


def of_release(tag: str) -> str:
    """A tag of what is computed from something immutable: another release may do it otherwise."""
    return f"{tag}.{__version__}"


def _held(request: Request) -> set[str]:
    """Entity tags of ``If-None-Match``, weak ones too: RFC 9110 compares them weakly."""
    sent = ",".join(request.headers.getlist("if-none-match"))
    return {entry.strip().removeprefix("W/") for entry in sent.split(",")}


REUSED = "Stagewright-Reused"
"""Names what of an answer had been found out before."""


def is_fresh(request: Request) -> bool:
    """Whether everything is to be found out again."""
    return "no-cache" in request.headers.get("cache-control", "").lower()


async def submit_key(request: Request) -> str | None:
    """What makes two submissions of a job one: the idempotency key, with what was sent."""
    key = request.headers.get(KEY_HEADER)
    if key is None:
        return None
    sent = hashlib.sha256(request.url.path.encode() + await request.body())
    return f"{key}:{sent.hexdigest()[:24]}"
