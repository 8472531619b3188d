"""``/metrics``: numbers about this server, for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from ..auth.scopes import METRICS
from ..openapi import PROBLEM_RESPONSE
from ..telemetry.metrics import Metrics


def metrics_routes(metrics: Metrics) -> APIRouter:
    """The route that Prometheus asks; it needs the scope ``metrics``."""
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
    def get_metrics() -> Response:
        """What this server counts: requests, searches, jobs, and its own process."""
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return router
