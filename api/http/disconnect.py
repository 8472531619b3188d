"""Work for a client that may leave before it is done."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from anyio import CancelScope
from starlette.types import Receive

from .problems import Problem

R = TypeVar("R")

CLIENT_CLOSED_REQUEST = 499
"""For the log, as nginx has it; nobody is there to read it."""


async def while_connected(receive: Receive, work: Awaitable[R]) -> R:
    """What some work gives; it is cancelled once the client has closed the connection.

    A thread that is waited for meanwhile is waited for to its end: what it began to store is
    stored, and then the work is done.

    Args:
        receive: Of a request whose body has been read.
        work: A coroutine.

    Raises:
        Problem: 499: the client has left.
        Exception: Whatever the work raises.
    """
    with CancelScope() as scope:
        leaving = asyncio.create_task(_cancelled_on_leaving(receive, scope))
        try:
            return await work
        finally:
            leaving.cancel()
    raise Problem(CLIENT_CLOSED_REQUEST, "client-left", "the client did not wait for the answer")


async def _cancelled_on_leaving(receive: Receive, scope: CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
