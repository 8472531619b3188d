"""``/healthz`` and ``/readyz``: open to everyone, so they reveal little."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Annotated, Literal

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import APIRouter

from ... import __version__
from ...core.document import Record
from ..http.problems import Problem
from ..middleware.graceful_shutdown import RETRY_AFTER_S, GracefulShutdown
from ..openapi import PROBLEM_RESPONSE
from ..planning.solver_pool import Solver
from ..store.store import Store
from .dependencies import from_state

CHECK_S = 3.0
"""Seconds that the database has to answer in."""

MAX_CHECKS = 4
"""Threads for database checks; one whose check hangs is lost to the others."""

CAUSES = {
    "database": "the database does not answer, or belongs to another release",
    "solver": "no solver process starts",
    "draining": "this server is shutting down",
}

_log = logging.getLogger(__name__)

router = APIRouter(tags=["health"], responses=PROBLEM_RESPONSE)


class Health(Record):
    """The server is alive."""

    status: Literal["ok"] = "ok"
    version: str


class Readiness(Record):
    """The server, its database and its solver processes can take requests."""

    status: Literal["ready"] = "ready"
    version: str


class ReadinessCheck:
    """Checks of everything that requests depend on.

    Args:
        store: Has to answer and be of this release.
        solver: Has to start processes.
        shutdown: Must not have begun.
    """

    def __init__(self, store: Store, solver: Solver, shutdown: GracefulShutdown) -> None:
        self._store, self._solver, self._shutdown = store, solver, shutdown
        # Threads of its own: where the database hangs, all threads of requests wait for it too,
        # and a check that queued behind them would never time out by itself.
        self._limiter = CapacityLimiter(MAX_CHECKS)

    async def failing(self) -> tuple[str, ...]:
        """Return the keys of `CAUSES` that keep this server from taking requests."""
        is_failing = {
            "database": await self._database_fails(),
            "solver": _fails("solver", self._solver.check),
            "draining": self._shutdown.is_draining,
        }
        return tuple(cause for cause, fails in is_failing.items() if fails)

    async def _database_fails(self) -> bool:
        try:
            async with asyncio.timeout(CHECK_S):
                return await run_sync(
                    _fails,
                    "database",
                    self._store.check,
                    abandon_on_cancel=True,
                    limiter=self._limiter,
                )
        except TimeoutError:
            _log.warning("not ready: database: no answer in %g s", CHECK_S)
            return True


def _fails(cause: str, check: Callable[[], None]) -> bool:
    try:
        check()
    except Exception as error:  # noqa: BLE001 - any error means that this server is not ready
        # Logged and not sent: anybody may ask, and the message may hold the database's address.
        _log.warning("not ready: %s: %s", cause, error)
        return True
    return False


@router.get("/healthz")
async def healthz() -> Health:
    """Return 200 while this process lives; its database is not checked."""
    return Health(version=__version__)


@router.get("/readyz")
async def readyz(check: Annotated[ReadinessCheck, from_state("readiness")]) -> Readiness:
    """Return 200 if requests may be sent to this server; a 503 names what is not ready.

    The database has to answer and be of this release, solver processes have to start, and the
    server must not be shutting down.
    """
    causes = await check.failing()
    if causes:
        raise not_ready(causes)
    return Readiness(version=__version__)


def not_ready(causes: tuple[str, ...]) -> Problem:
    """Return the problem that this server is not ready, for these keys of `CAUSES`."""
    problem = Problem(
        503,
        "not-ready",
        "; ".join(CAUSES[cause] for cause in causes),
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )
    problem.document = problem.document.model_copy(update={"not_ready": causes})
    return problem
