"""``/v1/api-keys``: API keys of the caller's project."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, get_args

from fastapi import Body, Query, Response
from pydantic import AwareDatetime, Field

from ...core.document import Record
from ...core.errors import InvalidInput
from ...core.service.documents import Title
from ...core.service.keys import ApiKey, KeyList, NewApiKey, Quotas
from ..auth.access import KEYS, CurrentPrincipal
from ..auth.scopes import Scope
from ..http.examples import KEY_EXAMPLES
from ..http.pagination import Cursor, Limit, blame_parameter
from ..http.problems import Problem
from ..planning.service import pointing_at
from .dependencies import TheStore, strict_router

MAX_LIVE_KEYS = 1000
"""Per project, so that a runaway program cannot fill the database."""

OfProject = Annotated[
    str | None,
    Query(
        max_length=80,
        description="Another project's keys, for the server's own token only.",
    ),
]

router = strict_router(KEYS, "keys")


class KeyRequest(Record):
    """A request for a new API key.

    Attributes:
        project_id: The project it is for; the caller's if not given, and another only with the
            server's own token.
        name: A label for people, to tell keys apart when one has to be revoked.
        scopes: What the key allows; only scopes that the caller has.
        quotas: Limits of the key; the server's defaults if not given.
        expires_at: When the key expires, with its offset from UTC.
    """

    project_id: str | None = Field(None, max_length=80)
    name: Title
    scopes: tuple[Scope, ...] = Field(min_length=1, max_length=len(get_args(Scope)))
    quotas: Quotas = Quotas()
    expires_at: AwareDatetime | None = None


@router.post("", status_code=201)
def create_key(
    store: TheStore,
    request: Annotated[KeyRequest, Body(openapi_examples=KEY_EXAMPLES)],
    response: Response,
    principal: CurrentPrincipal,
) -> NewApiKey:
    """Create a key. Its secret is in this response only: the server stores a hash of it."""
    # Without this, a key with the scope admin alone could create itself one that may do more.
    for scope in request.scopes:
        principal.require(scope, f"creating a key with the scope {scope!r}")
    if request.expires_at is not None and request.expires_at <= datetime.now(UTC):
        raise InvalidInput(
            f"{request.expires_at.isoformat()} is in the past; give a later time, or none",
            field="/expires_at",
        )
    project_id = principal.choose_project(request.project_id)
    with pointing_at("/project_id"):
        store.projects.get(project_id)
    if store.keys.count_live(project_id) >= MAX_LIVE_KEYS:
        raise Problem(
            409,
            "too-many-keys",
            f"the project has {MAX_LIVE_KEYS} keys, which is the limit; revoke one",
        )
    made = store.keys.create(
        project_id,
        name=request.name,
        scopes=request.scopes,
        quotas=request.quotas,
        expires_at=request.expires_at,
    )
    response.headers["Location"] = f"{KEYS}/{made.key.id}"
    response.headers["Cache-Control"] = "no-store"
    return made


@router.get("")
def list_keys(
    store: TheStore,
    principal: CurrentPrincipal,
    limit: Limit = 50,
    cursor: Cursor = None,
    project_id: OfProject = None,
) -> KeyList:
    """List the project's keys, newest first, without their secrets."""
    project_id = principal.choose_project(project_id)
    with blame_parameter("cursor"):
        page = store.keys.page(project_id, limit=limit, cursor=cursor)
    return KeyList(keys=page.items, next_cursor=page.next_cursor)


@router.delete("/{key_id}")
def revoke_key(
    store: TheStore, key_id: str, principal: CurrentPrincipal, project_id: OfProject = None
) -> ApiKey:
    """Revoke a key, effective with the next request.

    It stays in the list for as long as the server keeps keys that have ended: 90 days unless its
    setting `keep_keys_days` says otherwise.
    """
    return store.keys.revoke(principal.choose_project(project_id), key_id)
