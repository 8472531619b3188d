"""The server's log: JSON lines, or words for people, on stderr.

Modules log as ever, with `logging`; fields go into ``extra``. What libraries log (uvicorn, dask,
SQLAlchemy, warnings) comes out the same way.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, MutableMapping
from typing import Any, Literal, TextIO

import structlog
from structlog.types import Processor

from .redaction import Scrubber
from .tracing import trace_ids

LogFormat = Literal["auto", "json", "console"]

NOISY = ("alembic", "asyncio", "distributed", "httpx")
"""Libraries whose warnings are of interest, and no more."""


def configure_logging(
    format: LogFormat = "auto",
    level: str = "info",
    *,
    secrets: Iterable[str] = (),
    stream: TextIO | None = None,
) -> None:
    """Have everything this process logs written one way; what was set up before is replaced.

    Args:
        format: ``auto`` is for people on a terminal, else JSON.
        level: The least that is logged.
        secrets: Never written, wherever they turn up.
        stream: Where to; stderr.
    """
    target = sys.stderr if stream is None else stream
    handler = logging.StreamHandler(target)
    for_people = is_for_people(format, target)
    last: Processor = (
        structlog.dev.ConsoleRenderer(
            colors=target.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
        if for_people
        else structlog.processors.JSONRenderer()
    )
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[
                structlog.contextvars.merge_contextvars,
                structlog.stdlib.add_log_level,
                structlog.stdlib.add_logger_name,
                structlog.stdlib.ExtraAdder(),
                trace_ids,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
            ],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                _without_colours,
                Scrubber(secrets),
                last,
            ],
        )
    )
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    logging.captureWarnings(True)
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)


def is_for_people(format: LogFormat, stream: TextIO) -> bool:
    """Whether lines are words rather than JSON."""
    return format == "console" or (format == "auto" and stream.isatty())


def _without_colours(
    logger: object, method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Uvicorn says everything twice, once in colour."""
    event.pop("color_message", None)
    return event
