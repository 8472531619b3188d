"""The server's log on stderr: JSON lines, or text for people.

Modules use `logging` and put fields into ``extra``. Records of libraries (uvicorn, dask,
SQLAlchemy, warnings) pass the same formatter.
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

NOISY = ("asyncio", "distributed", "httpx")
"""Libraries of which only warnings are logged."""


def configure_logging(
    format: LogFormat = "auto",
    level: str = "info",
    *,
    secrets: Iterable[str] = (),
    stream: TextIO | None = None,
) -> None:
    """Configure all logging of this process, masking secrets; earlier handlers are replaced."""
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
                _drop_color_message,
                # After exceptions have become text, so that tracebacks are masked, too.
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
    """Return True if the log is text rather than JSON."""
    return format == "console" or (format == "auto" and stream.isatty())


def _drop_color_message(
    logger: object, method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Drop uvicorn's second, coloured copy of a message (a processor of structlog)."""
    event.pop("color_message", None)
    return event
