"""Messages of a child: JSON lines on standard error, the last of which may report an error."""

from __future__ import annotations

import builtins
import json
import logging
import os
import re
import sys
from typing import Any

from ...core.errors import (
    CaptureError,
    InvalidInput,
    MeasurementError,
    OutOfMemory,
    StagewrightError,
    to_printable,
)
from ...core.process_exit import describe_exit

CHILD_ERRORS = (InvalidInput, CaptureError, MeasurementError, OutOfMemory)
"""Errors whose message is meant for the client."""

MAX_LOGGED_CHARACTERS = 8000

_EXCEPTION = re.compile(
    r"((?:(?:torch|pydantic_core|transformers|stagewright)(?:\.\w{1,40}){1,8}|[A-Z]\w{1,40}))(?::|$)"
)
"""How the last line of a traceback begins."""

_FRAME = re.compile(r'(  File "(/[^"\0]{1,1000})", line \d{1,9}), in .+')

MAX_MESSAGE_CHARACTERS = 2000
MAX_NAME_CHARACTERS = 200

_log = logging.getLogger(__name__)


def progress_of(line: bytes) -> dict[str, Any] | None:
    """Return a line's ``done``, ``total`` and ``layer``; `None` if it reports no progress."""
    message = _parse_object(line)
    done, total, layer = message.get("done"), message.get("total"), message.get("layer", "")
    if not (_is_count(done) and _is_count(total) and isinstance(layer, str)):
        return None
    return {"done": done, "total": total, "layer": to_printable(layer)[:MAX_NAME_CHARACTERS]}


def error_of(returncode: int, stderr: bytes, kills_before: int = 0) -> StagewrightError:
    """Return the error that explains a child's end; where it failed goes to the log only.

    ``kills_before`` is `count_memory_kills` when the child started.
    """
    lines = stderr.decode("utf-8", "replace").strip().splitlines()
    reported = _reported(lines[-1] if lines else "")
    if reported is not None:
        _log.info("measuring child ended with %s: %s", returncode, type(reported).__name__)
        return reported
    _log.warning("measuring child ended with %s:\n%s", returncode, _traced(lines))
    if returncode < 0 or returncode > 128:  # bwrap exits as a shell does
        return MeasurementError(
            f"the measuring process {describe_exit(returncode, kills_before)}; measure a smaller "
            "model or a smaller micro-batch, or try again"
        )
    return MeasurementError(
        "the model failed while it was built or measured, with an unexpected error; the server's "
        "log has the details, and `stagewright profile` shows them"
    )


def _traced(lines: list[str]) -> str:
    """Return the files and lines of a traceback and its exception's class.

    Messages, source lines and progress are left out: they quote the names that a client sent. A
    quoted name may itself look like a frame, so a frame counts only if its file is one that Python
    imports from. Where the sandbox failed, its own messages are all there is.
    """
    if all(line.startswith("bwrap: ") for line in lines):
        return "\n".join(lines)[-MAX_LOGGED_CHARACTERS:]
    frames = [match for line in lines if (match := _FRAME.fullmatch(line))]
    code = {path for path in {frame[2] for frame in frames} if _is_code(path)}
    kept = [frame[1] for frame in frames if frame[2] in code]
    names = [match[1] for line in lines if (match := _EXCEPTION.match(line))]
    known = [name for name in names if "." in name or hasattr(builtins, name)]
    return "\n".join([*kept, *known[-1:]])[-MAX_LOGGED_CHARACTERS:]


def _is_code(path: str) -> bool:
    roots = {sys.prefix, sys.base_prefix, *sys.path} - {"", "/"}
    return any(path.startswith(f"{root}/") for root in roots) and os.path.isfile(path)


def _reported(line: str) -> StagewrightError | None:
    """Return the error of `CHILD_ERRORS` that a line reports, if any."""
    try:
        found = StagewrightError.from_record(_parse_object(line), CHILD_ERRORS)
    except ValueError:
        return None
    found.args = (str(found)[:MAX_MESSAGE_CHARACTERS],)
    for name, value in vars(found).items():
        if isinstance(value, str):
            setattr(found, name, value[:MAX_NAME_CHARACTERS])
    return found if isinstance(found, CHILD_ERRORS) else None


def _parse_object(line: str | bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _is_count(value: object) -> bool:
    # A child is not trusted: its numbers end up in columns and messages.
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31
