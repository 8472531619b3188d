"""Choice of the worker backend by the server's settings."""

from __future__ import annotations

from ..model_sources.measure import MeasuringSetup
from ..settings.settings import ServerSettings
from .dask_scheduler import EmbeddedScheduler, RemoteScheduler
from .dask_workers import DaskWorkers
from .thread_workers import ThreadWorkers
from .workers import WorkerBackend

EMBEDDED, THREADS = "embedded", "threads"


def build_workers(settings: ServerSettings) -> WorkerBackend:
    """Return the backend; nothing is started before the first job.

    Raises:
        InvalidInput, Refused: See `dask_scheduler.RemoteScheduler`.
    """
    if settings.scheduler == THREADS:
        return ThreadWorkers()
    if settings.scheduler == EMBEDDED:
        return DaskWorkers(EmbeddedScheduler(settings.log_format, settings.log_level))
    return DaskWorkers(RemoteScheduler(settings.scheduler, settings.scheduler_tls))


def is_local(scheduler: str) -> bool:
    """Return True if jobs run on the server's machine."""
    return scheduler in (EMBEDDED, THREADS)


def local_setup(settings: ServerSettings) -> MeasuringSetup | None:
    """Return how local workers measure; `None` for remote ones, which have their own settings."""
    return MeasuringSetup.from_settings(settings) if is_local(settings.scheduler) else None
