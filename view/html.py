"""HTML from templates: parts of the page, and one self-contained file."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ..core.document import Record
from ..core.text_table import sanitize
from ..core.units import count, format_bytes, format_rate, format_time
from .plan_view import PlanView

HERE = Path(__file__).parent
STATIC = HERE / "static"
MODULES = (
    "format.js", "dom.js", "address.js", "table.js", "scrolling.js", "tip.js", "chart.js",
    "mixture.js", "critical-path.js", "collectives.js", "gantt.js", "memory.js", "bars.js",
    "modules.js", "graph-edges.js", "graph.js", "meshes.js", "measured.js", "plan.js",
)  # fmt: skip
"""The modules of the plan page; each imports from those before it alone."""

_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


def environment(*folders: Path) -> Environment:
    """Return an environment for templates of these folders and this one, escaping everything."""
    made = Environment(
        loader=FileSystemLoader([*folders, HERE / "templates"]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        auto_reload=False,  # an upgrade under a running server changes no page
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(time=format_time, bytes=format_bytes, percent=percent, data=data)
    made.filters.update(lines=lines, rate=format_rate)
    made.globals.update(count=count)
    return made


def _shown(value: Any) -> Any:
    """Escape characters of untrusted names that would reverse or break a line."""
    plain = isinstance(value, str) and not isinstance(value, Markup)
    return sanitize(value) if plain else value


def lines(text: str) -> Markup:
    """Keep line breaks of a text and escape its other control characters."""
    return Markup("\n").join(map(sanitize, text.split("\n")))


def percent(share: float) -> str:
    """Format a share, for example ``12.3 %``."""
    return f"{share * 100:.1f} %"


def data(value: Any) -> Markup:
    """Write JSON for a data block, escaping whatever could end the element."""
    text = value.model_dump_json() if isinstance(value, Record) else json.dumps(value)
    # "<" could begin "</script>"; the two separators end a line of JavaScript but not of JSON.
    for character in "<\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def plan_page(view: PlanView) -> str:
    """Render one HTML file that shows a plan offline: styles, scripts and data are inside."""
    style, script = stylesheet(), program()
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return (
        environment()
        .get_template("file.html")
        .render(
            view=view,
            block=data(view),
            live=False,
            title="",
            step="here" if view.boxes is not None else "never",
            style=Markup(style),
            script=Markup(script),
            policy=policy,
            version=metadata.version("stagewright"),
        )
    )


@cache
def stylesheet() -> str:
    """Read the style sheet shared by page and file."""
    return "\n" + (STATIC / "style.css").read_text(encoding="utf-8")


@cache
def program() -> str:
    """Concatenate the JavaScript modules without their imports and exports."""
    texts = [(STATIC / name).read_text(encoding="utf-8") for name in MODULES]
    return "\n" + "\n".join(_EXPORT.sub("", _IMPORT.sub("", text)) for text in texts)


def _hash(text: str) -> str:
    """Hash a text as a Content-Security-Policy source (CSP level 3)."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
