"""What a child says: JSON lines on standard error, of which the last may be an error's."""

from __future__ import annotations

import json
import logging
import signal
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
"""Errors whose message a child addresses to the caller."""

MAX_LOGGED_CHARACTERS = 8000
MAX_MESSAGE_CHARACTERS = 2000
MAX_NAME_CHARACTERS = 200

_log = logging.getLogger(__name__)


def progress_of(line: bytes) -> dict[str, Any] | None:
    """How far a child says it is: ``done``, ``total`` and ``layer``; `None` for other talk."""
    told = _object(line)
    done, total, layer = told.get("done"), told.get("total"), told.get("layer", "")
    if not (_is_count(done) and _is_count(total) and isinstance(layer, str)):
        return None
    return {"done": done, "total": total, "layer": _printable(layer)[:MAX_NAME_CHARACTERS]}


def error_of(returncode: int, talk: bytes) -> StagewrightError:
    """Why a child ended; what it said beyond its last line goes to the log and no further."""
    lines = talk.decode("utf-8", "replace").strip().splitlines()
    _log.warning(
        "measuring child ended with %s:\n%s", returncode, "\n".join(lines)[-MAX_LOGGED_CHARACTERS:]
    )
    reported = _reported(lines[-1] if lines else "")
    if reported is not None:
        return reported
    number = -returncode if returncode < 0 else returncode - 128  # a sandbox ends as a shell does
    if number in {*signal.Signals}:
        return MeasurementError(
            f"the measuring process was ended by {signal.Signals(number).name}; the model "
            "most likely needs more memory than the server has: measure a smaller one, "
            "or a smaller micro-batch"
        )
    return MeasurementError(
        "the model failed while it was built or measured, for a reason the measuring process did "
        "not foresee; the server's log has the details, and `stagewright profile` shows them"
    )


def _reported(line: str) -> StagewrightError | None:
    """The error of `CHILD_ERRORS` that a line announces, if it does."""
    announced = _object(line)
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


def _object(line: str | bytes) -> dict[str, Any]:
    try:
        told = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def _printable(text: str) -> str:
    """The text without halves of characters, which JSON may hold and nothing else takes."""
    return text.encode("utf-8", "replace").decode()


def _is_count(value: object, below: int = 2**31) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < below
