"""Prometheus metrics of a server.

Labels take few values: templates of routes, known methods, classes of statuses; never an id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    generate_latest,
    start_http_server,
)

from ... import __version__

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
REUSED = {"plan": "plan", "profile": "profile"}

REQUEST_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
WORK_BUCKETS_S = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 900, 3600)


class Metrics:
    """Metrics of one server, in a registry of their own: tests run several in a process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        Info("stagewright_build", "The release.", registry=self.registry).info(
            {"version": __version__}
        )
        self._requests = Counter(
            "stagewright_http_requests",
            "Requests answered.",
            ("method", "route", "status"),
            registry=self.registry,
        )
        self._request_durations = Histogram(
            "stagewright_http_request_duration_seconds",
            "From the first line of a request to the end of its answer; streams are left out.",
            ("method", "route"),
            buckets=REQUEST_BUCKETS_S,
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "stagewright_http_requests_in_flight", "Being answered now.", registry=self.registry
        )
        self._reused = Counter(
            "stagewright_reused",
            "Answers found rather than worked out: plans and profiles known, and answers given "
            "again for an idempotency key.",
            ("what",),
            registry=self.registry,
        )
        self._work = Histogram(
            "stagewright_solver_duration_seconds",
            "Searches for plans and simulations, the wait for their turn left out.",
            ("work",),
            buckets=WORK_BUCKETS_S,
            registry=self.registry,
        )
        self._jobs_ended = Histogram(
            "stagewright_job_duration_seconds",
            "Jobs that ended here, from start to end of the last attempt.",
            ("kind", "state"),
            buckets=WORK_BUCKETS_S,
            registry=self.registry,
        )
        self._jobs_waited = Histogram(
            "stagewright_job_queued_seconds",
            "How long jobs waited to be started.",
            ("kind",),
            buckets=WORK_BUCKETS_S,
            registry=self.registry,
        )

    def answered(
        self, method: str, route: str, status: int | None, duration_s: float | None
    ) -> None:
        """Count a request: without a status it was cut off, without a duration it was a stream."""
        # Clients may send any word as a method, and each would be a label of its own.
        known = method if method in METHODS else "other"
        self._requests.labels(
            known, route, "none" if status is None else f"{status // 100}xx"
        ).inc()
        if duration_s is not None:
            self._request_durations.labels(known, route).observe(duration_s)

    def reused(self, headers: Mapping[str, str]) -> None:
        """Count a response whose headers say that it was reused."""
        what = REUSED.get(headers.get("stagewright-reused", ""))
        if what is not None:
            self._reused.labels(what).inc()
        if headers.get("idempotency-replayed") == "true":
            self._reused.labels("answer").inc()

    def worked(self, work: str, duration_s: float) -> None:
        """Record the duration of a search or simulation."""
        self._work.labels(work).observe(duration_s)

    def job_started(self, kind: str, queued_s: float) -> None:
        """Record the time a job has waited in the queue."""
        self._jobs_waited.labels(kind).observe(queued_s)

    def job_ended(self, kind: str, state: str, duration_s: float) -> None:
        """Record the final state of a job and the duration of its last attempt."""
        self._jobs_ended.labels(kind, state).observe(duration_s)

    def watch(self, name: str, help: str, value: Callable[[], float]) -> None:
        """Register a gauge whose value is computed at each scrape."""
        Gauge(f"stagewright_{name}", help, registry=self.registry).set_function(value)

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def listen(self, address: str) -> Callable[[], None]:
        """Serve metrics on ``host:port`` without a token until the returned function is called."""
        host, _, port = address.rpartition(":")
        server, thread = start_http_server(int(port), host.strip("[]"), registry=self.registry)

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return stop
