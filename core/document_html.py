"""What draws documents for notebooks: found by name, since drawing lies above the documents."""

from __future__ import annotations

from importlib import metadata
from typing import Any

GROUP = "stagewright.drawers"
"""Entry points of this group take a document and give HTML."""


def render_html(kind: str, document: Any) -> str | None:
    """HTML of a document; `None` if nothing installed draws its kind."""
    for found in metadata.entry_points(group=GROUP, name=kind):
        html = found.load()(document)
        assert isinstance(html, str), f"{found.value} gives HTML"
        return html
    return None
