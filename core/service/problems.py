"""Error responses as problem documents (RFC 9457)."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ..document import Record

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "urn:problem-type:stagewright:"


class FieldError(Record):
    """An invalid field.

    Attributes:
        pointer: JSON pointer (RFC 6901) into the body; empty for the whole body.
        parameter: The query parameter, if the field is not in the body.
        detail: What is wrong and what is accepted.
    """

    pointer: str | None = None
    parameter: str | None = None
    detail: str


class ProblemDocument(Record):
    """The body of an error response (RFC 9457).

    Attributes:
        type: Identifier of the kind of problem, for programs.
        title: The kind in words, equal for every occurrence.
        detail: What happened, and the remedy.
        errors: Every invalid field, if the input is invalid.
        not_ready: What is missing, if the server is not ready.
        request_id: Id of the request in the server's log.
        kinds: Classes of the library's error that it was, the most specific first.
        details: That error's attributes, such as the `layer` that ran out of memory.
    """

    type: str
    title: str
    status: int
    detail: str
    errors: tuple[FieldError, ...] = ()
    not_ready: tuple[str, ...] = ()
    request_id: str | None = None
    kinds: tuple[str, ...] = ()
    details: dict[str, Any] = Field({})
