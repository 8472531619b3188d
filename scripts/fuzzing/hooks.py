"""Hooks for schemathesis: bodies that reach far, one more check, a count.

Loaded by schemathesis itself, as ``SCHEMATHESIS_HOOKS`` says, in its own process.

A body made from its schema alone is nearly always refused by the first rule that ties two fields
together. So half of the bodies that fit are put aside for one of the documentation's examples with
a few values changed, and the ids in it taken from what the service stored before.
"""

from __future__ import annotations

import atexit
import json
import os
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import schemathesis
from schemathesis.core.failures import Failure

from scripts.fuzzing.mutate import changed
from scripts.limits import deadline_of, lateness

DEADLINE_VARIABLE = "STAGEWRIGHT_FUZZ_DEADLINE_S"
"""The server's own deadline."""

COUNTS_VARIABLE = "STAGEWRIGHT_FUZZ_COUNTS"
"""Where to write how many requests each operation had, by status."""

PROBLEM = "application/problem+json"
EXPECTED = {400, 401, 403, 404, 405, 406, 409, 412, 413, 415, 422, 429}
"""What a request may be refused with. Nothing here waits for a device or another server, so no
5xx is an answer, not even one that the documentation knows."""

IDS = ("plan_id", "profile_id", "graph_id", "job_id", "key_id")
STORED_KEPT = 200

_counts: Counter[str] = Counter()
_stored: dict[str, list[str]] = {}


@schemathesis.check
def refusal_says_why(ctx: Any, response: Any, case: Any) -> None:
    """Every refusal is a problem document, of an expected status, in words."""
    status = response.status_code
    if status < 400:
        return
    what = f"{case.operation.label} answered {status}"
    if status not in EXPECTED:
        raise Failure(operation=case.operation.label, title="Unexpected status", message=what)
    if case.method.upper() == "HEAD":
        return
    sent = response.headers.get("content-type", [""])[0]
    problem = response.json() if sent == PROBLEM else {}
    if problem.get("status") != status or not problem.get("detail") or not problem.get("type"):
        raise Failure(
            operation=case.operation.label,
            title="Refusal without a reason",
            message=f"{what} with {sent!r}: {response.text[:300]}",
        )


@schemathesis.check
def answered_in_time(ctx: Any, response: Any, case: Any) -> None:
    """No answer begins later than its deadline allows; one that streams ends with its job."""
    deadline_s = deadline_of(case.body, float(os.environ[DEADLINE_VARIABLE]))
    if line := lateness(case.operation.label, response.elapsed, deadline_s):
        raise Failure(operation=case.operation.label, title="Late answer", message=line)


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """Put another body, or the id of something stored, into half of the fitting requests."""
    meta = case.meta
    if meta is None or not meta.generation.mode.is_positive:
        return
    random = Random(repr((case.body, case.path_parameters, case.query)))
    for name in case.path_parameters or {}:
        known = _stored.get(name)
        if known and random.random() < 0.5:
            case.path_parameters = {**case.path_parameters, name: random.choice(known)}
    examples = _examples(case)
    if examples and random.random() < 0.5:
        case.body = changed(random.choice(examples), random, _stored)


@schemathesis.hook
def after_call(context: Any, case: Any, response: Any) -> None:
    """Count, and remember the ids of what was stored."""
    label = getattr(case.operation, "label", case.method)
    _counts[f"{label} {response.status_code}"] += 1
    if response.status_code in (200, 201, 202) and case.method.upper() == "POST":
        location = response.headers.get("location", [""])[0]
        kind, _, identifier = location.rpartition("/")[2].partition("_")
        if f"{kind}_id" in IDS:
            known = _stored.setdefault(f"{kind}_id", [])
            known.append(f"{kind}_{identifier}")
            del known[:-STORED_KEPT]


def _examples(case: Any) -> list[Any]:
    """Bodies that the documentation shows for an operation."""
    content = case.operation.definition.raw.get("requestBody", {}).get("content", {})
    examples = content.get("application/json", {}).get("examples", {})
    return [example["value"] for example in examples.values()]


@atexit.register
def _write_counts() -> None:
    if path := os.environ.get(COUNTS_VARIABLE):
        Path(path).write_text(json.dumps(_counts))
