"""What runs the jobs of a server, by its settings."""

from __future__ import annotations

from ..model_sources.measure import MeasuringSetup
from ..settings.settings import ServerSettings
from .dask_scheduler import EmbeddedScheduler, RemoteScheduler
from .dask_workers import DaskWorkers
from .thread_workers import ThreadWorkers
from .workers import WorkerBackend

EMBEDDED, THREADS = "embedded", "threads"


def build_workers(settings: ServerSettings) -> WorkerBackend:
    """What runs them; nothing of it is started before there is a job.

    Raises:
        InvalidInput, Refused: See `scheduler.RemoteScheduler`.
    """
    if settings.scheduler == THREADS:
        return ThreadWorkers()
    if settings.scheduler == EMBEDDED:
        return DaskWorkers(EmbeddedScheduler(settings.log_format, settings.log_level))
    return DaskWorkers(RemoteScheduler(settings.scheduler, settings.scheduler_tls))


def is_local(scheduler: str) -> bool:
    """Whether jobs run on the server's own machine."""
    return scheduler in (EMBEDDED, THREADS)


def local_setup(settings: ServerSettings) -> MeasuringSetup | None:
    """How workers on this machine measure; those elsewhere have settings of their own."""
    return MeasuringSetup.from_settings(settings) if is_local(settings.scheduler) else None
