"""Which methods a path takes.

The framework has a route for each method, and says of a path only what the first one takes.
"""

from __future__ import annotations

from fastapi import FastAPI
from starlette.routing import compile_path


def allowed_methods(app: FastAPI, path: str) -> str | None:
    """What to put into ``Allow`` (RFC 9110, section 10.2.1); `None` for an undocumented path."""
    found = {
        method.upper()
        for template, methods in app.openapi()["paths"].items()
        if compile_path(template)[0].match(path)
        for method in methods
    }
    return ", ".join(sorted(found)) or None
