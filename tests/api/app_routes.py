"""Every route and mount of an application, found in the application and not in its OpenAPI."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI
from starlette.routing import Mount, Route


def routes(app: FastAPI) -> Iterator[tuple[str, str]]:
    """Method and path of each; a mount answers to any method below its path."""
    for route in _flat(app.routes):
        if isinstance(route, Mount):
            yield "GET", f"{route.path}/anything"
        elif isinstance(route, Route):
            assert route.methods, f"{route.path} takes any method; name them"
            for method in route.methods - {"HEAD"}:
                yield method, route.path
        else:
            raise AssertionError(f"this walk does not know what {route!r} is")


def _flat(found: list[Any]) -> Iterator[Any]:
    """FastAPI keeps an included router as one entry."""
    for route in found:
        included = getattr(route, "original_router", None)
        if included is None:
            yield route
        else:
            yield from _flat(included.routes)
