"""Which methods a path takes.

The framework has a route for each method, and says of a path only what the first one takes.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.routing import compile_path


def allowed_methods(app: FastAPI, path: str) -> str | None:
    """What to put into ``Allow`` (RFC 9110, section 10.2.1); `None` for an undocumented path."""
    paths = app.openapi()["paths"]
    fitting = [path] if path in paths else [known for known in paths if _fits(known, path)]
    found = {method.upper() for known in fitting for method in paths[known]}
    return ", ".join(sorted(found)) or None


def _fits(template: str, path: str) -> bool:
    return compile_path(template)[0].match(path) is not None
