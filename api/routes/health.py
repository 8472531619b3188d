"""``/healthz`` and ``/readyz``: open to everyone, so they say little."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Literal

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import APIRouter

from ... import __version__
from ...core.document import Record
from ..http.problems import Problem
from ..middleware.graceful_shutdown import RETRY_AFTER_S, GracefulShutdown
from ..openapi import PROBLEM_RESPONSE
from ..planning.solver_pool import Solver
from ..store.base import Store

CHECK_S = 3.0
"""How long the database may take to say that it is well."""

MAX_CHECKS = 4
"""Threads that ask it; one that never comes back is lost to the rest."""

_log = logging.getLogger(__name__)


class Health(Record):
    """The server answers."""

    status: Literal["ok"] = "ok"
    version: str


class Readiness(Record):
    """The server, its database and its planning processes can do their work."""

    status: Literal["ready"] = "ready"
    version: str


def health_routes(store: Store, solver: Solver, shutdown: GracefulShutdown) -> APIRouter:
    """What decides whether a server is started anew, and whether requests are sent to it."""
    router = APIRouter(tags=["health"], responses=PROBLEM_RESPONSE)
    turn = CapacityLimiter(MAX_CHECKS)

    @router.get("/healthz")
    async def healthz() -> Health:
        """Whether this process lives. It is not asked for its database, which outlives it."""
        return Health(version=__version__)

    @router.get("/readyz")
    async def readyz() -> Readiness:
        """Whether requests may be sent here: 503 names what is not ready.

        The database has to answer and be of this release, planning processes have to start, and
        the server must not be on its way out.
        """
        missing = {
            "database": await _database_fails(store, turn),
            "solver": _fails("solver", solver.check),
            "draining": shutdown.is_draining,
        }
        if any(missing.values()):
            raise not_ready(tuple(name for name, is_missing in missing.items() if is_missing))
        return Readiness(version=__version__)

    return router


WORDS = {
    "database": "the database does not answer, or is of another release",
    "solver": "no planning process starts",
    "draining": "this server is stopping",
}


def not_ready(missing: tuple[str, ...]) -> Problem:
    """That requests had better go elsewhere.

    Args:
        missing: What is not ready, out of `WORDS`.
    """
    problem = Problem(
        503,
        "not-ready",
        "; ".join(WORDS[name] for name in missing),
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )
    problem.document = problem.document.model_copy(update={"not_ready": missing})
    return problem


async def _database_fails(store: Store, turn: CapacityLimiter) -> bool:
    """Whether it does not answer in time, which a database that hangs never does.

    The threads are not those of other requests: where the database hangs, those all wait for it.
    """
    try:
        async with asyncio.timeout(CHECK_S):
            return await run_sync(
                _fails, "database", store.check, abandon_on_cancel=True, limiter=turn
            )
    except TimeoutError:
        _log.warning("not ready: database: no answer in %g s", CHECK_S)
        return True


def _fails(name: str, check: Callable[[], None]) -> bool:
    """Whether a check raises; what it says is for the log, since anybody may ask."""
    try:
        check()
    except Exception as error:  # noqa: BLE001 - whatever it is, the answer is the same
        _log.warning("not ready: %s: %s", name, error)
        return True
    return False
