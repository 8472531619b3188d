"""Who is asking: what a route, and what it calls, is told about it."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from ...core.document import Record
from ..http.problems import Problem
from ..store.records import DEFAULT_PROJECT, Quotas
from .scopes import SCOPES, Scope


class Principal(Record):
    """Somebody who proved who they are.

    Attributes:
        id: The API key's id, or ``oidc:`` and the subject; `None` for the server's own token.
        project_id: The project everything they make belongs to, and all they see.
        scopes: What they may do.
        quotas: How much of it.
    """

    id: str | None = None
    project_id: str = DEFAULT_PROJECT
    scopes: frozenset[Scope] = frozenset()
    quotas: Quotas = Quotas()

    def require(self, scope: Scope, doing: str) -> None:
        """Refuse what needs a scope they have not.

        Args:
            scope: What is needed.
            doing: What needs it, in words: "measuring a model".

        Raises:
            Problem: 403.
        """
        if scope not in self.scopes:
            held = ", ".join(name for name in SCOPES if name in self.scopes) or "none"
            raise Problem(
                403,
                "forbidden",
                f"{doing} needs the scope {scope!r}; this key has {held}: use another key, "
                "or have one made with 'stagewright keys create'",
                headers={"WWW-Authenticate": f'Bearer error="insufficient_scope", scope="{scope}"'},
            )


OPERATOR = Principal(scopes=frozenset(SCOPES))
"""Who has the server's own token."""


async def principal_of(request: Request) -> Principal:
    """Who sent a request, as `authentication` found out.

    A coroutine, because FastAPI runs other dependencies in a thread, which takes longer than this.
    """
    principal = request.state.principal
    assert isinstance(principal, Principal)
    return principal


CurrentPrincipal = Annotated[Principal, Depends(principal_of)]
"""The parameter of a route that is told who asks."""
