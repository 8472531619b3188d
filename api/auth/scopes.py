"""What a key may do: five scopes, and which of them each request needs.

A scope does not hold another. What no line below names needs ``admin``, so that a route somebody
forgot here is closed to everyone who only reads and plans.
"""

from __future__ import annotations

from typing import Literal, get_args

Scope = Literal["read", "plan", "measure", "admin", "metrics"]

SCOPES: tuple[Scope, ...] = get_args(Scope)

MEANING: dict[Scope, str] = {
    "read": "see what the project stores, and what this service can do",
    "plan": "store profiles and graphs, plan, simulate, compare, cancel jobs",
    "measure": "run a model on the server's devices",
    "admin": "make, list and revoke the project's keys; read its audit log",
    "metrics": "read the server's metrics, which count all projects together",
}

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
"""Answered to everyone."""

DOCUMENTATION = frozenset({"/openapi.json", "/docs"})
API = "/v1/"
KEYS = "/v1/api-keys"
AUDIT = "/v1/audit"
METRICS = "/metrics"
PLANNED = ("/v1/plans", "/v1/profiles", "/v1/graphs", "/v1/jobs")
"""Collections that ``plan`` adds to and changes, with everything below them."""
COMPUTED = frozenset({"/v1/simulations", "/v1/comparisons"})
"""Answered to a POST, with nothing stored."""
MEASURED = frozenset({"/v1/profile-jobs"})
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


def needed_scope(method: str, path: str) -> Scope:
    """The scope a request needs whatever its body says; the body may need another as well.

    Args:
        method: In capitals.
        path: Decoded, without the query.
    """
    if is_below(path, KEYS) or is_below(path, AUDIT):
        return "admin"
    if path == METRICS and method in SAFE_METHODS:
        return "metrics"
    if method in SAFE_METHODS:
        return "read" if path.startswith(API) or path in DOCUMENTATION else "admin"
    if path in MEASURED:
        return "measure"
    if path in COMPUTED or any(is_below(path, collection) for collection in PLANNED):
        return "plan"
    return "admin"


def is_below(path: str, collection: str) -> bool:
    """Whether a path is a collection's or that of something in it."""
    return path == collection or path.startswith(collection + "/")
