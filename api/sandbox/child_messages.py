"""Messages of a child: JSON lines on standard error, the last of which may report an error."""

from __future__ import annotations

import builtins
import json
import logging
import os
import re
import signal
import sys
from typing import Any

from ...core.errors import (
    CaptureError,
    InvalidInput,
    MeasurementError,
    OutOfMemory,
    StagewrightError,
)

CHILD_ERRORS: dict[str, type[StagewrightError]] = {
    error.__name__: error for error in (InvalidInput, CaptureError, MeasurementError, OutOfMemory)
}
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
    return {"done": done, "total": total, "layer": _printable(layer)[:MAX_NAME_CHARACTERS]}


def error_of(returncode: int, stderr: bytes) -> StagewrightError:
    """Return the error that explains a child's end; where it failed goes to the log only."""
    lines = stderr.decode("utf-8", "replace").strip().splitlines()
    reported = _reported(lines[-1] if lines else "")
    if reported is not None:
        _log.info("measuring child ended with %s: %s", returncode, type(reported).__name__)
        return reported
    _log.warning("measuring child ended with %s:\n%s", returncode, _traced(lines))
    number = -returncode if returncode < 0 else returncode - 128  # bwrap exits as a shell does
    if number in {*signal.Signals}:
        return MeasurementError(
            f"the measuring process was killed by {signal.Signals(number).name}; the model most "
            "likely needs more memory than the server has: measure a smaller model or a smaller "
            "micro-batch"
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
    announced = _parse_object(line)
    error_class = CHILD_ERRORS.get(str(announced.get("error")))
    if error_class is None or "message" not in announced:
        return None
    message = _printable(str(announced["message"]))[:MAX_MESSAGE_CHARACTERS]
    field = announced.get("field")
    if error_class is InvalidInput and isinstance(field, str):
        return InvalidInput(message, field=_printable(field)[:MAX_NAME_CHARACTERS])
    if error_class is OutOfMemory:
        return _out_of_memory(message, announced)
    return error_class(message)


def _out_of_memory(message: str, announced: dict[str, Any]) -> OutOfMemory:
    layer = announced.get("layer")
    required, available = (announced.get(f"{name}_bytes") for name in ("required", "available"))
    return OutOfMemory(
        message,
        layer=_printable(layer)[:MAX_NAME_CHARACTERS] if isinstance(layer, str) else None,
        required_bytes=required if _is_count(required, 2**63) else None,
        available_bytes=available if _is_count(available, 2**63) else None,
    )


def _parse_object(line: str | bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _printable(text: str) -> str:
    """Return text without lone surrogates, which JSON may hold and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()


def _is_count(value: object, below: int = 2**31) -> bool:
    # A child is not trusted: its numbers end up in columns and messages.
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < below
