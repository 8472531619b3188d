"""A service on a free port of this machine, in a thread of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import uvicorn
from starlette.concurrency import run_in_threadpool

from stagewright.api.app import create_app
from stagewright.api.model_sources.estimator import Estimator
from stagewright.api.settings.settings import ServerSettings
from stagewright.api.store.database import IN_MEMORY
from stagewright.core.requests.requests import Estimated, EstimateRequest
from tests.shared_solvers import shared_solvers

TOKEN = "a-token-for-tests"


@contextmanager
def live_service(**settings: Any) -> Iterator[str]:
    """Its address; it takes `TOKEN`. Estimates are made in this process: a child's start is slow.

    What a child does differently is tested with the children.
    """
    given = {
        "token": TOKEN,
        "database": IN_MEMORY,
        "scheduler": "threads",
        "sandbox": "off",
        **settings,
    }
    with shared_solvers():
        app = create_app(ServerSettings(**given))
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            port=0,
            log_level="critical",
            log_config=None,  # uvicorn's own would keep later tests' lines from the root logger
            ws="none",
        )
    )
    thread = threading.Thread(target=server.run)
    with patch.object(Estimator, "estimate", _estimate):
        thread.start()
        try:
            deadline = time.monotonic() + 30
            while not server.started and thread.is_alive() and time.monotonic() < deadline:
                time.sleep(0.005)
            port = server.servers[0].sockets[0].getsockname()[1]
            yield f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            thread.join(30)


async def _estimate(
    self: Estimator, request: EstimateRequest, _: str = "", __: float | None = None
) -> Estimated:
    from stagewright.profiler.estimates.worker import estimate

    return await run_in_threadpool(estimate, request)
