"""Lookup of HTML renderers for notebooks by entry point, as rendering lies above the documents."""

from __future__ import annotations

from importlib import metadata
from typing import Any

GROUP = "stagewright.drawers"
"""Entry points of this group take a document and return HTML."""


def render_html(kind: str, document: Any) -> str | None:
    """Return a document as HTML; `None` if no renderer for its kind is installed."""
    for found in metadata.entry_points(group=GROUP, name=kind):
        html = found.load()(document)
        assert isinstance(html, str), f"{found.value} gives HTML"
        return html
    return None
