"""What there is instead of a path or method that is not: methods of the path, the nearest path.

The framework has a route for each method, and says of a path only what the first one takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.routing import compile_path

Paths = Mapping[str, frozenset[str]]
"""Methods by documented path."""


def documented_paths(routers: Iterable[APIRouter]) -> Paths:
    """What the OpenAPI document lists, without making that, which takes most of a second."""
    found: dict[str, frozenset[str]] = {}
    for router in routers:
        for route in router.routes:
            if isinstance(route, APIRoute) and route.include_in_schema:
                found[route.path] = found.get(route.path, frozenset()) | set(route.methods or ())
    return found


def allowed_methods(paths: Paths, path: str) -> str | None:
    """What to put into ``Allow`` (RFC 9110, section 10.2.1); `None` for an undocumented path."""
    fitting = [path] if path in paths else [known for known in paths if _fits(known, path)]
    found = {method for known in fitting for method in paths[known]}
    return ", ".join(sorted(found)) or None


def missing_page(paths: Paths, path: str) -> str:
    """That there is nothing at a path, and what somebody may have meant."""
    near = get_close_matches(path[:200], paths, n=1, cutoff=0.8)
    meant = f"did you mean {near[0]}? " if near else ""
    return f"there is no such page; {meant}GET /openapi.json describes all there are"


def _fits(template: str, path: str) -> bool:
    return compile_path(template)[0].match(path) is not None
