"""Access: the principal who sent a request, and the scope that the request needs.

A path that is not listed here needs ``admin``, so that a forgotten route is closed to keys that
only read and plan.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from ...core.document import Record
from ..errors import Forbidden
from ..store.records import DEFAULT_PROJECT, Quotas
from .scopes import SCOPES, Scope

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/sign-in", "/sign-out"})
"""Paths that need no token."""

OPEN_FILES = "/static/"
"""Prefix of the page's style sheets and scripts, which need no token either."""

PAGES = ("/plans", "/profiles", "/jobs", "/compare", "/new")
"""Pages for browsers, with all paths below them; they show what ``read`` may see."""

DOCUMENTATION = frozenset({"/openapi.json", "/docs"})
API = "/v1/"
KEYS = "/v1/api-keys"
AUDIT = "/v1/audit"
PROJECTS = "/v1/projects"
METRICS = "/metrics"
PLANNED = ("/v1/plans", "/v1/profiles", "/v1/graphs")
"""Collections that ``plan`` adds to and changes, with all paths below them."""
COMPUTED = frozenset({"/v1/simulations", "/v1/comparisons", "/v1/views", "/plans/file"})
"""POSTs that compute and store nothing."""
MEASURED = ("/v1/profile-jobs", "/v1/jobs")
"""Collections whose changes start and stop work on devices."""
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


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

    @property
    def owner(self) -> str:
        """Return who is charged for what the principal uses: its key, or the server's token."""
        return self.id or "the server's token"

    def require(self, scope: Scope, action: str) -> None:
        """Raise `Forbidden` unless the principal has a scope, which an action in words needs."""
        if scope not in self.scopes:
            held = ", ".join(name for name in SCOPES if name in self.scopes) or "none"
            raise Forbidden(
                f"{action} needs the scope {scope!r}; this key has {held}. Use another key, or "
                "create one with 'stagewright keys create'.",
                scope=scope,
            )

    @property
    def is_operator(self) -> bool:
        """Return True for the holder of the server's own token."""
        return self.id is None

    def require_operator(self, action: str) -> None:
        """Raise `Forbidden` unless this is the operator, for an action in words."""
        if not self.is_operator:
            raise Forbidden(f"{action} needs the server's own token; keys belong to one project.")

    def choose_project(self, project_id: str | None) -> str:
        """Return the project asked for; only the operator may ask for another than its own."""
        if project_id is not None and project_id != self.project_id:
            self.require_operator(f"managing keys of {project_id[:80]!r}")
        return project_id or self.project_id


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


def needed_scope(method: str, path: str) -> Scope:
    """Return the scope a request needs; its body may need a further one, which routes check."""
    # Most privileged first, and "admin" for all that is not listed.
    if is_below(path, KEYS) or is_below(path, AUDIT) or (path == PROJECTS and method == "POST"):
        return "admin"
    if path == METRICS and method in SAFE_METHODS:
        return "metrics"
    if method in SAFE_METHODS:
        readable = path.startswith(API) or path in DOCUMENTATION or is_page(path)
        return "read" if readable else "admin"
    if any(is_below(path, collection) for collection in MEASURED):
        return "measure"
    if path in COMPUTED or any(is_below(path, collection) for collection in PLANNED):
        return "plan"
    return "admin"


def is_below(path: str, collection: str) -> bool:
    """Return True for a collection's path and every path below it."""
    return path == collection or path.startswith(collection + "/")


def is_page(path: str) -> bool:
    """Return True for the path of a page for browsers."""
    return path == "/" or any(is_below(path, page) for page in PAGES)


def is_open(path: str) -> bool:
    """Return True for a path that needs no token."""
    return path in OPEN_PATHS or path.startswith(OPEN_FILES)
