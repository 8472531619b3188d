"""Scopes: the five rights of a key, and which of them a request needs.

No scope includes another. A path that is not listed here needs ``admin``, so that a forgotten
route is closed to keys that only read and plan.
"""

from __future__ import annotations

from typing import Literal, get_args

Scope = Literal["read", "plan", "measure", "admin", "metrics"]

SCOPES: tuple[Scope, ...] = get_args(Scope)

MEANING: dict[Scope, str] = {
    "read": "see what the project stores, and what this service can do",
    "plan": "store profiles and graphs, plan, simulate, compare",
    "measure": "run a model on the server's devices or its workers', cancel jobs",
    "admin": "make, list and revoke the project's keys; read its audit log",
    "metrics": "read the server's metrics, which count all projects together",
}

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
METRICS = "/metrics"
PLANNED = ("/v1/plans", "/v1/profiles", "/v1/graphs")
"""Collections that ``plan`` adds to and changes, with all paths below them."""
COMPUTED = frozenset({"/v1/simulations", "/v1/comparisons", "/v1/views"})
"""POSTs that compute and store nothing."""
MEASURED = ("/v1/profile-jobs", "/v1/jobs")
"""Collections whose changes start and stop work on devices."""
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


def needed_scope(method: str, path: str) -> Scope:
    """Return the scope a request needs; its body may need a further one, which routes check.

    Args:
        method: In upper case.
        path: Decoded, without the query.
    """
    # Most privileged first, and "admin" for all that is not listed.
    if is_below(path, KEYS) or is_below(path, AUDIT):
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
