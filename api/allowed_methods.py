"""What there is instead of a path or method that is not: methods of the path, the nearest path.

The framework has a route for each method, and says of a path only what the first one takes.
"""

from __future__ import annotations

from difflib import get_close_matches

from fastapi import FastAPI
from starlette.routing import compile_path


def allowed_methods(app: FastAPI, path: str) -> str | None:
    """What to put into ``Allow`` (RFC 9110, section 10.2.1); `None` for an undocumented path."""
    paths = app.openapi()["paths"]
    fitting = [path] if path in paths else [known for known in paths if _fits(known, path)]
    found = {method.upper() for known in fitting for method in paths[known]}
    return ", ".join(sorted(found)) or None


def missing_page(app: FastAPI, path: str) -> str:
    """That there is nothing at a path, and what somebody may have meant."""
    near = get_close_matches(path, app.openapi()["paths"], n=1, cutoff=0.8)
    meant = f"did you mean {near[0]}? " if near else ""
    return f"there is no such page; {meant}GET /openapi.json describes all there are"


def _fits(template: str, path: str) -> bool:
    return compile_path(template)[0].match(path) is not None
