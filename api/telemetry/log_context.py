"""Log context: the ids of the request or job that each log line belongs to.

They live in context variables: a task, and the threads it calls, see only their own.
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
    """Return the client's request id if it is one word of 1 to 128 characters, else a new one."""
    if sent is not None and _WELL_FORMED.fullmatch(sent):
        return sent
    return f"req_{secrets.token_hex(12)}"


def request_id() -> str | None:
    """Return the id of the current request; None outside of one."""
    found = get_contextvars().get("request_id")
    return found if isinstance(found, str) else None


@contextmanager
def bind(**values: str | None) -> Iterator[None]:
    """Add values to the lines logged inside: ``bind(job_id=...)``."""
    with bound_contextvars(**_known(values)):
        yield


def add(**values: str | None) -> None:
    """Add values to the lines logged from here on in this task."""
    bind_contextvars(**_known(values))


@contextmanager
def fresh(**values: str | None) -> Iterator[None]:
    """Bind these values alone; both earlier ones and those added inside are dropped afterwards."""
    # A server's tasks inherit the context of the connection, and with it an earlier request's ids.
    clear_contextvars()
    try:
        with bind(**values):
            yield
    finally:
        clear_contextvars()


def _known(values: dict[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in values.items() if value is not None}
