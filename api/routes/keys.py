"""``/v1/api-keys``: the keys of the caller's project."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Body, Response
from pydantic import AwareDatetime, Field

from ...core.document import Record
from ...core.errors import InvalidInput
from ...core.service.keys import ApiKey, KeyList, NewApiKey, Quotas
from ..auth.principal import CurrentPrincipal, Principal
from ..auth.scopes import KEYS, Scope
from ..http.examples import key_examples
from ..http.problems import Problem
from ..http.strict_json import StrictRoute
from ..openapi import PROBLEM_RESPONSE
from ..store.base import Store

MAX_LIVE_KEYS = 1000
"""Of one project, so that a program gone wild cannot fill the database."""


class KeyRequest(Record):
    """A key to be made.

    Attributes:
        name: For people, so that they know which to revoke.
        scopes: What its holder may do; none that the caller has not.
        quotas: How much of it; without them there is no limit.
        expires_at: When it stops to open anything, with its offset from UTC.
    """

    name: str = Field(min_length=1, max_length=200)
    scopes: tuple[Scope, ...] = Field(min_length=1)
    quotas: Quotas = Quotas()
    expires_at: AwareDatetime | None = None


def key_routes(store: Store) -> APIRouter:
    """Routes that make, list and revoke keys; they need the scope ``admin``."""
    router = APIRouter(
        prefix=KEYS, tags=["keys"], route_class=StrictRoute, responses=PROBLEM_RESPONSE
    )

    @router.post("", status_code=201)
    def create_key(
        request: Annotated[KeyRequest, Body(openapi_examples=key_examples())],
        response: Response,
        principal: CurrentPrincipal,
    ) -> NewApiKey:
        """Make a key. Its secret is in this answer and nowhere else: the server keeps a hash."""
        made = create(store, principal, request)
        response.headers["Location"] = f"{KEYS}/{made.key.id}"
        response.headers["Cache-Control"] = "no-store"
        return made

    @router.get("")
    def list_keys(principal: CurrentPrincipal) -> KeyList:
        """Every key of the project; the secrets cannot be had again."""
        return KeyList(keys=tuple(store.keys.list(principal.project_id)))

    @router.delete("/{key_id}")
    def revoke_key(key_id: str, principal: CurrentPrincipal) -> ApiKey:
        """Revoke a key: it opens nothing from the next request on. It stays in the list."""
        return store.keys.revoke(principal.project_id, key_id)

    return router


def create(store: Store, principal: Principal, request: KeyRequest) -> NewApiKey:
    """Make a key for the caller's project.

    Raises:
        Problem: 403: it would have a scope that the caller has not. 409: `MAX_LIVE_KEYS` keys
            are not revoked.
        InvalidInput: It would have expired already.
    """
    for scope in request.scopes:
        principal.require(scope, f"making a key with the scope {scope!r}")
    now = datetime.now(UTC)
    if request.expires_at is not None and request.expires_at <= now:
        raise InvalidInput(
            f"{request.expires_at.isoformat()} is past; choose a later time, or none",
            field="/expires_at",
        )
    keys = store.keys.list(principal.project_id)
    if sum(key.revoked_at is None for key in keys) >= MAX_LIVE_KEYS:
        raise Problem(
            409,
            "too-many-keys",
            f"this project has {MAX_LIVE_KEYS} keys, which is the limit; revoke one",
        )
    return store.keys.create(
        principal.project_id,
        name=request.name,
        scopes=request.scopes,
        quotas=request.quotas,
        expires_at=request.expires_at,
    )
