"""``/metrics``, and the metrics that are read when they are asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Annotated

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from ...core.errors import StagewrightError
from ..auth.access import METRICS
from ..middleware.graceful_shutdown import GracefulShutdown
from ..openapi import PROBLEM_RESPONSE
from ..planning.solver_pool import Solver
from ..store.store import Store
from ..telemetry.metrics import Metrics
from .dependencies import from_state

_log = logging.getLogger(__name__)

router = APIRouter(tags=["operations"], responses=PROBLEM_RESPONSE)


@router.get(
    METRICS,
    response_class=Response,
    responses={
        200: {
            "description": "Prometheus's text format",
            "content": {"text/plain": {"schema": {"type": "string"}}},
        }
    },
)
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
