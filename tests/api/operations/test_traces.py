"""Traces: requests and the work inside them, by OpenTelemetry's variables and not without."""

from __future__ import annotations

import builtins
import io
import json
import logging
import os
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from stagewright.api.telemetry.logs import configure_logging
from stagewright.api.telemetry.tracing import configure_tracing, span

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans(monkeypatch):
    """Spans that end from here on; the process has no provider afterwards."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield lambda: {found.name: found for found in exporter.get_finished_spans()}
    provider.shutdown()


@pytest.fixture
def no_variables(monkeypatch):
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


def test_a_request_is_a_span_with_its_search_inside(spans, client, profile):
    body = {"profile": profile, "cluster": "2xcpu"}
    answer = client.post("/v1/plans", json=body, headers={"traceparent": PARENT})
    assert answer.status_code == 201
    request, solve = spans()["POST /v1/plans"], spans()["stagewright.solve"]
    assert solve.parent.span_id == request.context.span_id
    assert solve.attributes["stagewright.work"] == "decide"
    assert f"{request.context.trace_id:032x}" == PARENT.split("-")[1]
    assert request.attributes["http.response.status_code"] == 201


def test_probes_are_no_spans(spans, client):
    client.get("/healthz")
    client.get("/readyz")
    assert spans() == {}


def test_no_secret_is_in_a_span(spans, client, token):
    client.get("/v1/plans/plan_1")
    client.get("/v1/plans", headers={"Authorization": "Bearer " + "sw_" + "k" * 43})
    text = " ".join(found.to_json() for found in spans().values())
    assert token not in text
    assert "kkkk" not in text


def test_lines_of_the_log_name_their_trace(spans, own_logging):
    stream = io.StringIO()
    configure_logging("json", "info", stream=stream)
    with span("stagewright.test", kind="x", nothing=None):
        logging.getLogger("stagewright.t").info("inside")
    logging.getLogger("stagewright.t").info("outside")
    inside, outside = map(json.loads, stream.getvalue().splitlines())
    (found,) = spans().values()
    assert inside["trace_id"] == f"{found.context.trace_id:032x}"
    assert dict(found.attributes) == {"stagewright.kind": "x"}
    assert "trace_id" not in outside


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OTEL_SERVICE_NAME": "x"},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:1"},
        {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:1"},
    ],
)
def test_without_its_variables_nothing_happens(monkeypatch, caplog, variables):
    def refuse(*_):
        raise AssertionError("a provider was set")

    monkeypatch.setattr(trace, "set_tracer_provider", refuse)
    configure_tracing(variables)()
    with span("stagewright.test"):
        pass
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "use otlp, console or none"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:1", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
         "not 'grpc'"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_a_warning(caplog, variables, says):
    configure_tracing(variables)()
    assert says in caplog.text


def test_without_the_extra_a_warning_says_what_to_install(monkeypatch, caplog):
    real = builtins.__import__

    def without(name, *arguments, **options):
        if name.startswith("opentelemetry.sdk"):
            raise ModuleNotFoundError("gone", name=name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    configure_tracing({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:1"})()
    assert "pip install -e '.[otel]'" in caplog.text


def test_without_opentelemetry_at_all_work_is_done(monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **options):
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError("gone", name=name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with span("stagewright.test"):
        done = True
    assert done


def test_spans_are_sent_where_the_variables_say(monkeypatch, no_variables):
    received = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            received.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            """Nothing."""

    set_providers = []
    monkeypatch.setattr(trace, "set_tracer_provider", set_providers.append)
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        monkeypatch.setenv("NO_PROXY", "*")
        end = configure_tracing()
        (provider,) = set_providers
        provider.get_tracer("t").start_span("stagewright.sent").end()
        end()
        server.shutdown()
    ((path, body),) = received
    assert path == "/v1/traces"
    assert b"stagewright.sent" in body
    assert b"service.name" in body
