"""``/healthz``, ``/readyz``, ``/metrics`` and ``/v1/audit``, for whoever operates the server.

Health is open to everyone, so it reveals little.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Annotated, Literal

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ... import __version__
from ...core.document import Record
from ...core.errors import StagewrightError
from ..auth.access import AUDIT, METRICS, CurrentPrincipal
from ..http.pagination import Cursor, Limit, blame_parameter
from ..http.problems import PROBLEM_RESPONSE, RETRY_AFTER_S, Problem
from ..middleware.graceful_shutdown import GracefulShutdown
from ..planning.solver_pool import Solver
from ..store.records import AuditEntry
from ..store.store import Store
from ..telemetry.metrics import Metrics
from .dependencies import TheStore, from_state

CHECK_S = 3.0
"""Seconds that the database has to answer in."""

MAX_CHECKS = 4
"""Threads for database checks; one whose check hangs is lost to the others."""

CAUSES = {
    "database": "the database does not answer, takes no writes, or belongs to another release",
    "solver": "no solver process starts",
    "draining": "this server is shutting down",
}

_log = logging.getLogger(__name__)

probes = APIRouter(include_in_schema=False)
"""For load balancers and Prometheus, which read no OpenAPI document."""

audit = APIRouter(tags=["operations"], responses=PROBLEM_RESPONSE)


class Health(Record):
    """The server is alive."""

    status: Literal["ok"] = "ok"
    version: str


class Readiness(Record):
    """The server, its database and its solver processes can take requests."""

    status: Literal["ready"] = "ready"
    version: str


class ReadinessCheck:
    """Checks of everything that requests depend on: store, solver processes and shutdown."""

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


@probes.get("/healthz")
async def healthz() -> Health:
    """Return 200 while this process lives; its database is not checked."""
    return Health(version=__version__)


@probes.get("/readyz")
async def readyz(check: Annotated[ReadinessCheck, from_state("readiness")]) -> Readiness:
    """Return 200 if requests may be sent to this server; a 503 names what is not ready.

    The database has to be of this release and take a write, solver processes have to start, and the
    server must not be shutting down.
    """
    causes = await check.failing()
    if not causes:
        return Readiness(version=__version__)
    detail = "; ".join(CAUSES[cause] for cause in causes)
    problem = Problem(503, "not-ready", detail, headers={"Retry-After": str(RETRY_AFTER_S)})
    problem.document = problem.document.model_copy(update={"not_ready": causes})
    raise problem


@probes.get(METRICS, response_class=Response)
def get_metrics(metrics: Annotated[Metrics, from_state("metrics")]) -> Response:
    """Return the server's metrics: requests, searches, jobs, and its own process."""
    return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)


def watch(metrics: Metrics, store: Store, solver: Solver, shutdown: GracefulShutdown) -> None:
    """Register the gauges of the solver, of graceful shutdown and of the store."""
    metrics.watch("solver_waiting", "Searches that wait for a process.", lambda: solver.num_waiting)
    metrics.watch("solver_running", "Searches that have one.", lambda: solver.num_running)
    metrics.watch("draining", "1 once this server is on its way out.", lambda: shutdown.is_draining)
    metrics.registry.register(StoreNumbers(store))


class StoreNumbers(Collector):
    """Collector of the store's availability and of its jobs by state."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def collect(self) -> Iterator[GaugeMetricFamily]:
        up = GaugeMetricFamily("stagewright_store_up", "1 if the database answers and fits.")
        jobs = GaugeMetricFamily(
            "stagewright_jobs",
            "Jobs in the database, of every server that shares it.",
            labels=("kind", "state"),
        )
        try:
            self._store.check()
            for (kind, state), number in sorted(self._store.jobs.counts().items()):
                jobs.add_metric((kind, state), number)
            up.add_metric((), 1)
        except (StagewrightError, OSError) as error:
            # A scrape without a database still succeeds: the other metrics are wanted most then.
            _log.warning("metrics without the database: %s", error)
            up.add_metric((), 0)
        yield up
        yield jobs


class AuditList(Record):
    """A page of the audit log, newest entry first.

    Attributes:
        entries: The entries of this page.
        next_cursor: Cursor of the next page; `None` on the last.
    """

    entries: tuple[AuditEntry, ...]
    next_cursor: str | None = None


@audit.get(AUDIT)
def list_audit(
    store: TheStore, principal: CurrentPrincipal, limit: Limit = 50, cursor: Cursor = None
) -> AuditList:
    """List what was created, changed, revoked or denied in this project, newest first.

    Entries that belong to no project, such as a denied request without a valid token, are visible
    to the operator only: ``stagewright audit``.
    """
    with blame_parameter("cursor"):
        page = store.audit.entries(project_id=principal.project_id, limit=limit, cursor=cursor)
    return AuditList(entries=page.items, next_cursor=page.next_cursor)
