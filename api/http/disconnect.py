"""Work that ends when its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from anyio import CancelScope
from starlette.types import Receive

from .problems import Problem

R = TypeVar("R")

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for the log; the client is no longer there to see it."""


async def while_connected(receive: Receive, work: Awaitable[R]) -> R:
    """Return the result of some work, or cancel it when its client disconnects: `Problem` 499."""
    # anyio's scope and not task.cancel(): it lets threads that the work waits for finish, so that
    # what they began to store is stored.
    with CancelScope() as scope:
        watch = asyncio.create_task(_cancel_on_disconnect(receive, scope))
        try:
            return await work
        finally:
            watch.cancel()
    raise Problem(CLIENT_CLOSED_REQUEST, "client-left", "The client disconnected.")


async def _cancel_on_disconnect(receive: Receive, scope: CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
