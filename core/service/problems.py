"""Errors as RFC 9457 problems: what a failed request is answered with."""

from __future__ import annotations

from ..document import Record

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "urn:problem-type:stagewright:"


class FieldError(Record):
    """One field at fault.

    Attributes:
        pointer: JSON pointer (RFC 6901) into the body; empty for the body as a whole.
        parameter: The query parameter instead, if it is not in the body.
        detail: What is wrong with it and what is accepted.
    """

    pointer: str | None = None
    parameter: str | None = None
    detail: str


class ProblemDocument(Record):
    """The body of an error response (RFC 9457).

    Attributes:
        type: Names the kind of problem; programs compare this.
        title: The kind in words; the same for every occurrence.
        detail: What happened this time, and the way out.
        errors: For invalid input, every field at fault.
        not_ready: Of a server that is not ready, what is missing.
        request_id: The request's, as in the server's log; to quote to whoever runs the server.
        layer: For memory that ran out, the layer to blame, if it is one.
        required_bytes: Likewise what was needed there.
        available_bytes: And what the device, or the limit, has in all.
    """

    type: str
    title: str
    status: int
    detail: str
    errors: tuple[FieldError, ...] = ()
    not_ready: tuple[str, ...] = ()
    request_id: str | None = None
    layer: str | None = None
    required_bytes: int | None = None
    available_bytes: int | None = None
