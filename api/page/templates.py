"""Templates and static files of the pages, read once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment

from ...view.html import STATIC, environment
from ...view.profile_view import changes_of
from .display_names import model_words

HERE = Path(__file__).parent
MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


@dataclass(frozen=True)
class Asset:
    """Static file."""

    content: bytes
    media_type: str
    tag: str


@cache
def assets() -> dict[str, Asset]:
    """Return all static files by name; nothing else is served."""
    found = {}
    for path in (*STATIC.iterdir(), *(HERE / "static").iterdir()):
        media_type = MEDIA_TYPES.get(path.suffix)
        if media_type is not None:
            # Tagged by content: servers of one release behind a proxy give the same tags.
            content = path.read_bytes()
            found[path.name] = Asset(content, media_type, hashlib.sha256(content).hexdigest()[:24])
    return found


@cache
def _environment() -> Environment:
    """Return the environment with all templates loaded."""
    made = environment(HERE / "templates")
    made.globals.update(changes_of=changes_of, model_words=model_words)
    for name in made.list_templates():
        made.get_template(name)
    return made


def load() -> None:
    """Read all files, so that an upgrade under a running server does not mix two releases."""
    assets()
    _environment()


def render(name: str, **values: Any) -> str:
    """Render a page from its template."""
    return _environment().get_template(name).render(**values)


def error_page(problem: dict[str, Any]) -> str:
    """Render the page of a problem."""
    return render("error.html", problem=problem, here="")
