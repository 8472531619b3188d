"""Tracing: the ids of a request or job on the lines it logs, and its spans.

The ids live in context variables: a task, and the threads it calls, see only their own. Spans are
configured by OpenTelemetry's own variables; without them, they do nothing. FastAPI makes the spans
of requests, if its release can; the spans here are inside of those.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

from structlog.contextvars import (
    bind_contextvars,
    bound_contextvars,
    clear_contextvars,
    get_contextvars,
)

REQUEST_ID_HEADER = "X-Request-ID"

_WELL_FORMED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:=+/-]{0,127}")


def accepted_request_id(sent: str | None) -> str:
    """Return the client's request id if it is one word of 1 to 128 characters, else a new one."""
    if sent is not None and _WELL_FORMED.fullmatch(sent):
        return sent
    return f"req_{secrets.token_hex(12)}"


def request_id() -> str | None:
    """Return the id of the current request; None outside of one."""
    found = get_contextvars().get("request_id")
    return found if isinstance(found, str) else None


@contextmanager
def bind(**values: str | None) -> Iterator[None]:
    """Add values to the lines logged inside: ``bind(job_id=...)``."""
    with bound_contextvars(**_known(values)):
        yield


def add(**values: str | None) -> None:
    """Add values to the lines logged from here on in this task."""
    bind_contextvars(**_known(values))


@contextmanager
def fresh(**values: str | None) -> Iterator[None]:
    """Bind these values alone; both earlier ones and those added inside are dropped afterwards."""
    # A server's tasks inherit the context of the connection, and with it an earlier request's ids.
    clear_contextvars()
    try:
        with bind(**values):
            yield
    finally:
        clear_contextvars()


def _known(values: dict[str, str | None]) -> dict[str, str]:
    return {name: value for name, value in values.items() if value is not None}


OTLP = "http/protobuf"
"""Protocol of spans; OpenTelemetry's default."""

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")

PROBES = frozenset({"/healthz", "/readyz", "/metrics"})
"""Paths requested every few seconds: not traced, and logged as ``debug`` while healthy."""

_log = logging.getLogger(__name__)


@contextmanager
def span(name: str, **attributes: str | int | float | None) -> Iterator[None]:
    """Open a span in the current trace, if there is one, without attributes that are `None`."""
    # Imported here: it is an extra, and takes long to import where it is not used.
    try:
        from opentelemetry import trace
    except ModuleNotFoundError:
        yield
        return
    known = {f"stagewright.{key}": value for key, value in attributes.items() if value is not None}
    with trace.get_tracer("stagewright").start_as_current_span(name, attributes=known):
        yield


def trace_ids(
    logger: object, method: str, event: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    """Add the ids of the current trace and span to a log line (a processor of structlog)."""
    # Not imported for this: without the module there is no trace, and importing it takes long.
    found = sys.modules.get("opentelemetry.trace")
    if found is not None:
        context = found.get_current_span().get_span_context()
        if context.is_valid:
            event["trace_id"] = f"{context.trace_id:032x}"
            event["span_id"] = f"{context.span_id:016x}"
    return event


def configure_tracing(environment: Mapping[str, str] = os.environ) -> Callable[[], None]:
    """Export spans as OpenTelemetry's variables say until the returned function is called.

    ``OTEL_EXPORTER_OTLP_ENDPOINT`` (or ``..._TRACES_ENDPOINT``), or ``OTEL_TRACES_EXPORTER`` as
    ``otlp`` or ``console``, turns it on; OpenTelemetry itself reads the rest (headers, sampler,
    service name, resource). Errors are warnings: a server without traces is better than none.
    """
    kind = _exporter(environment)
    if kind is None:
        return _no_tracing
    if kind not in ("otlp", "console"):
        _log.warning("no traces: OTEL_TRACES_EXPORTER is %r; use otlp, console or none", kind)
        return _no_tracing
    protocol = next((environment[name] for name in PROTOCOLS if environment.get(name)), OTLP)
    if kind == "otlp" and protocol != OTLP:
        _log.warning("no traces: spans are sent as %s, not %r; unset %s", OTLP, protocol, PROTOCOLS)
        return _no_tracing
    try:
        provider = _provider(kind, environment)
    except ModuleNotFoundError as error:
        _log.warning(
            "no traces: OpenTelemetry's variables are set, but %s is not installed; "
            "run: pip install -e '.[otel]' (in the checkout)",
            error.name,
        )
        return _no_tracing
    from opentelemetry import trace

    trace.set_tracer_provider(provider)
    shutdown: Callable[[], None] = provider.shutdown
    return shutdown


def fastapi_options() -> dict[str, Any]:
    """Return FastAPI's options: spans for requests only, and none for probes.

    Releases that cannot make spans ignore them.
    """
    return {
        "telemetry": {
            "auto_configure": False,
            "operation_spans": False,
            "metrics": False,
            "logs": False,
            "exclude": lambda scope: scope.get("path") in PROBES,
        }
    }


def _exporter(environment: Mapping[str, str]) -> str | None:
    """Return the kind of exporter configured, or None."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    named = environment.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if named:
        return None if named == "none" else named
    return "otlp" if any(environment.get(name) for name in ENDPOINTS) else None


def _provider(kind: str, environment: Mapping[str, str]) -> Any:
    """Build the tracer provider; raise `ModuleNotFoundError` without the extra."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

    # A name in the environment would lose against one given in code.
    named = "OTEL_SERVICE_NAME" in environment or "service.name=" in environment.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    provider = TracerProvider(
        resource=Resource.create({} if named else {"service.name": "stagewright"})
    )
    if kind == "console":
        provider.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter(out=sys.stderr)))
        return provider
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def _no_tracing() -> None:
    """Stand in for the function that ends tracing."""
