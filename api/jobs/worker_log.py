"""Log of Dask's worker processes."""

from __future__ import annotations

from typing import Any

from distributed import WorkerPlugin

from ..telemetry.logs import LogFormat, configure_logging


class WorkerLog(WorkerPlugin):
    """Plugin that configures the log of every worker process, restarted ones included."""

    name = "stagewright-log"

    def __init__(self, format: LogFormat, level: str) -> None:
        self._format: LogFormat = format
        self._level = level

    def setup(self, worker: Any) -> None:
        configure_logging(self._format, self._level)
