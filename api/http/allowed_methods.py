"""Answers to unknown paths and methods: the ``Allow`` header, and the nearest known path.

Starlette has one route for each method and would list only the methods of the first that matches.
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
    """Return what the OpenAPI document lists, without building it, which takes most of a second."""
    found: dict[str, frozenset[str]] = {}
    for router in routers:
        for route in router.routes:
            if isinstance(route, APIRoute) and route.include_in_schema:
                found[route.path] = found.get(route.path, frozenset()) | set(route.methods or ())
    return found


def allowed_methods(paths: Paths, path: str) -> str | None:
    """Return the ``Allow`` header (RFC 9110, 10.2.1), or None for an undocumented path."""
    fitting = [path] if path in paths else [known for known in paths if _fits(known, path)]
    found = {method for known in fitting for method in paths[known]}
    return ", ".join(sorted(found)) or None


def unknown_path_message(paths: Paths, path: str) -> str:
    """Return the message for an unknown path, with the nearest known one."""
    # Cut: comparing takes time that grows with the product of the lengths.
    near = get_close_matches(path[:200], paths, n=1, cutoff=0.8)
    meant = f" Did you mean {near[0]}?" if near else ""
    return f"No such page.{meant} See GET /openapi.json for all paths."


def _fits(template: str, path: str) -> bool:
    return compile_path(template)[0].match(path) is not None
