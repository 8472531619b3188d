"""What every line of the log carries of the request or job it belongs to.

Values live in context variables: a task and the threads it calls see their own, no other's.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from structlog.contextvars import (
    bind_contextvars,
    bound_contextvars,
    clear_contextvars,
    get_contextvars,
)

REQUEST_ID_HEADER = "X-Request-ID"

_WELL_FORMED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:=+/-]{0,127}")


def accepted_request_id(sent: str | None) -> str:
    """The id a caller gave a request, if it is one word of 1 to 128 characters; else a new one."""
    if sent is not None and _WELL_FORMED.fullmatch(sent):
        return sent
    return f"req_{secrets.token_hex(12)}"


def request_id() -> str | None:
    """The id of the request that is being answered; `None` outside of one."""
    found = get_contextvars().get("request_id")
    return found if isinstance(found, str) else None


@contextmanager
def bind(**values: str | None) -> Iterator[None]:
    """Lines logged inside carry these values: ``bind(job_id=...)``."""
    with bound_contextvars(**_told(values)):
        yield


def add(**values: str | None) -> None:
    """Lines logged from here on, in this task, carry these values."""
    bind_contextvars(**_told(values))


@contextmanager
def fresh(**values: str | None) -> Iterator[None]:
    """Lines logged inside carry these values and nothing bound before, or that others add."""
    clear_contextvars()
    try:
        with bind(**values):
            yield
    finally:
        clear_contextvars()


def _told(values: dict[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in values.items() if value is not None}
