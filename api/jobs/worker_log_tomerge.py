"""How the worker below a server logs: as the server does, whose stderr it has."""

from __future__ import annotations

from typing import Any

from distributed import WorkerPlugin

from ..telemetry.logs import LogFormat, configure_logging


class WorkerLog(WorkerPlugin):
    """Sets up the log of every worker that is started, also in another's place.

    Args:
        format: See `telemetry.logs.configure_logging`.
        level: Likewise.
    """

    name = "stagewright-log"

    def __init__(self, format: LogFormat, level: str) -> None:
        self._format: LogFormat = format
        self._level = level

    def setup(self, worker: Any) -> None:
        configure_logging(self._format, self._level)
