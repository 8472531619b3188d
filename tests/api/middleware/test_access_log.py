"""What a request that the server cancels at its end is answered."""

from __future__ import annotations

import asyncio

import pytest

from stagewright.api.middleware.access_log import AccessLog
from stagewright.api.middleware.graceful_shutdown import GracefulShutdown
from stagewright.api.telemetry.metrics import Metrics

SCOPE = {"type": "http", "method": "POST", "path": "/v1/plans", "headers": []}


@pytest.mark.parametrize("is_stopping", [True, False])
def test_what_the_end_of_the_grace_period_cuts_short_is_503_with_a_time_to_come_back(is_stopping):
    """uvicorn cancels what is left then, and answers a bare 500 unless there is an answer."""
    sent = []

    async def search(scope, receive, send):
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message)

    async def main():
        shutdown = GracefulShutdown()
        asked = asyncio.create_task(AccessLog(search, Metrics(), shutdown)({**SCOPE}, None, send))
        await asyncio.sleep(0)
        if is_stopping:
            shutdown.begin()
            shutdown.refuse()
        asked.cancel()
        if not is_stopping:
            with pytest.raises(asyncio.CancelledError):
                await asked
            return
        await asked
        assert sent[0]["status"] == 503
        headers = dict(sent[0]["headers"])
        assert headers[b"retry-after"] == b"10"
        assert b"service-stopping" in sent[1]["body"]

    asyncio.run(main())
