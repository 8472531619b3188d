"""The principal: who sent a request, as routes and services see it."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from ...core.document import Record
from ..errors import Forbidden
from ..store.records import DEFAULT_PROJECT, Quotas
from .scopes import SCOPES, Scope


class Principal(Record):
    """Authenticated sender of a request.

    Attributes:
        id: The API key's id, or ``oidc:`` and the subject; `None` for the server's own token.
        project_id: The project that owns what the principal makes, and all it can see.
        scopes: Rights.
        quotas: Limits on requests and jobs.
    """

    id: str | None = None
    project_id: str = DEFAULT_PROJECT
    scopes: frozenset[Scope] = frozenset()
    quotas: Quotas = Quotas()

    def require(self, scope: Scope, action: str) -> None:
        """Raise unless the principal has a scope.

        Args:
            scope: Needed for the action.
            action: The action in words, e.g. "measuring a model".

        Raises:
            Forbidden: The scope is missing.
        """
        if scope not in self.scopes:
            held = ", ".join(name for name in SCOPES if name in self.scopes) or "none"
            raise Forbidden(
                f"{action} needs the scope {scope!r}; this key has {held}. Use another key, or "
                "create one with 'stagewright keys create'.",
                scope=scope,
            )


OPERATOR = Principal(scopes=frozenset(SCOPES))
"""The holder of the server's own token."""


async def principal_of(request: Request) -> Principal:
    """Return the principal that `AuthMiddleware` found."""
    # A coroutine because FastAPI runs plain functions in a thread, which takes longer than this.
    principal = request.state.principal
    assert isinstance(principal, Principal)
    return principal


CurrentPrincipal = Annotated[Principal, Depends(principal_of)]
"""Parameter of a route that needs to know who sent the request."""
