"""Templates and static files of the pages, read once, and the names that they show."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment
from pydantic import ValidationError

from ...core.service.documents import PlanSummary, ProfileSummary
from ...core.units import count
from ...view.html import STATIC, environment
from ...view.profile_view import changes_of
from ..jobs.requests import JobSpec
from .plan_names import name_summary

UNITS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k"))
"""Units as in the names of models: 70 B parameters are 70 billion."""

MAX_NAME = 40
"""Longest name of a model in a list, in characters."""


def model_words(summary: PlanSummary | ProfileSummary) -> str:
    """Describe a model by name and size: ``gpt2, 50 layers, 1.56 B parameters``."""
    name = summary.family or summary.model or "Model"
    words = [_shorten(name)]
    if summary.num_layers is not None:
        words.append(count(summary.num_layers, "layer"))
    if summary.num_parameters is not None:
        words.append(f"{short(summary.num_parameters)} parameters")
    return ", ".join(words)


def job_words(kind: str, request_json: str) -> str:
    """Describe what a job does: ``Measure gpt2 and plan it``."""
    if not request_json:  # a long one, dropped when the job ended
        return _measure("a model", is_planned=kind == "plan")
    try:
        work = JobSpec.model_validate_json(request_json)
    except ValidationError:  # another release wrote the job
        return "A job"
    measure = work.measure
    if measure.graph is not None:
        name = measure.graph.model or "a captured model"
    elif measure.factory is not None:
        name = measure.factory.name
    else:
        assert measure.model is not None, "a request checks that"
        name = measure.model.family
    return _measure(_shorten(name), is_planned=work.plan is not None)


def _measure(name: str, *, is_planned: bool) -> str:
    return f"Measure {name}" + (" and plan it" if is_planned else "")


def _shorten(name: str) -> str:
    return name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…"


def short(number: int) -> str:
    """Format a number with three digits: ``124 M``."""
    for unit, letter in UNITS:
        if number >= unit:
            return f"{number / unit:.3g} {letter}"
    return str(number)


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
    made.globals.update(changes_of=changes_of, model_words=model_words, name_summary=name_summary)
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
