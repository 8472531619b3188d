"""Bodies made to break the server get a 4xx problem, never a 500."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from starlette.testclient import TestClient

from stagewright.api.app import create_app
from stagewright.api.http.examples import example_profile, measure_example
from stagewright.api.settings.settings import ServerSettings
from stagewright.api.store.database import IN_MEMORY
from tests.live_service import TOKEN

DEEP = 200_000


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def body_with(request: dict[str, Any], path: str, literal: str) -> bytes:
    """The request as JSON, one value replaced by a literal that ``json`` might not write."""
    *parents, last = path.split(".")
    here: Any = request
    for part in parents:
        here = here[int(part) if isinstance(here, list) else part]
    here[int(last) if isinstance(here, list) else last] = "REPLACE ME"
    return json.dumps(request).encode().replace(b'"REPLACE ME"', literal.encode())


MALFORMED = {
    "blank": b"  \n",
    "cut off": b'{"profile": ',
    "two values": b"{} {}",
    "single quotes": b"{'profile': 1}",
    "comment": b"{} // really",
    "NaN": b'{"cluster": NaN}',
    "Infinity": b'{"cluster": [Infinity, -Infinity]}',
    "deep arrays": b"[" * DEEP + b"]" * DEEP,
    "deep objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "deep and unclosed": b"[" * DEEP,
    "huge integer": b'{"cluster": ' + b"9" * 100_000 + b"}",
    "invalid UTF-8": b'{"cluster": "\xff\xfe"}',
    "UTF-16": '{"cluster": "2xcpu"}'.encode("utf-16"),
    "byte order mark": b'\xef\xbb\xbf{"cluster": "2xcpu"}',
    "encoded surrogate": b'{"cluster": "\xed\xa0\x80"}',
    "lone surrogate": b'{"cluster": "\\ud800"}',
    "surrogate in a key": b'{"\\udfff": 1}',
    "raw NUL": b'{"cluster": "\x00"}',
    "gzip": b"\x1f\x8b\x08\x00\x00",
    "pickle": b"\x80\x04\x95\x0b\x00\x00\x00",
}

NOT_A_REQUEST = ["", "null", "true", "0", '"profile"', "[]", "[[]]", "{}", '{"profile": null}',
                 '{"": 1}', '{"__class__": "Plan"}', '{"profile": [], "cluster": {}}']  # fmt: skip

LITERALS = ["null", "true", "-1", "1e999", "-1e999", "1e-999", "9" * 4000, "-" + "9" * 4000,
            "1.5", '""', '"\\u0000"', '"NaN"', '"inf"', '"' + "9" * 5000 + '"', "[]", "{}",
            "[[[[]]]]", '{"family": "mlp"}', '"' + "x" * 100_000 + '"',
            json.dumps(nested(150))]  # fmt: skip

PROFILE_PATHS = [
    "schema_version", "model", "spec", "layers", "boundaries", "parameters", "storages", "loss",
    "provenance", "notes", "layers.0", "layers.0.layer.name", "layers.0.forward",
    "layers.0.forward.median_s", "layers.0.forward.repeats", "layers.0.layer.parameter_bytes",
    "layers.0.saved_activation_bytes", "layers.0.workspace_bytes", "layers.0.output_bytes",
    "boundaries.0.after", "boundaries.0.tensors.0.shape", "boundaries.0.tensors.0.shape.0",
    "boundaries.0.tensors.0.dtype", "parameters.0.layers", "parameters.0.layers.0",
    "parameters.0.size_bytes", "parameters.0.numel", "storages.0.size_bytes",
    "storages.0.layers.0",
]  # fmt: skip

REQUEST_PATHS = [
    "profile", "profile_id", "cluster", "options", "options.num_stages",
    "options.num_microbatches", "options.memory_fraction", "options.schedule", "sample",
    "profiling", "cluster.devices", "cluster.devices.0.memory_bytes", "cluster.levels",
    "cluster.levels.0.group_size", "cluster.levels.0.latency_s",
    "cluster.levels.0.bandwidth_bytes_per_s",
    "cluster.levels.0.all_reduce_bandwidth_bytes_per_s", "cluster.levels.0.all_reduce",
    "cluster.schema_version",
]  # fmt: skip

MEASURE_PATHS = [
    "model", "model.family", "model.config", "model.config.hidden_size", "sample.inputs",
    "sample.inputs.input", "sample.inputs.input.shape", "sample.inputs.input.shape.0",
    "sample.inputs.input.low", "sample.seed", "sample.target", "profiling.budget_s",
    "profiling.device", "profiling.num_threads",
]  # fmt: skip


@pytest.fixture(scope="module")
def post():
    """Post to a service whose measuring always ends in a refusal, so that nothing is built."""
    program = (
        "import sys; sys.stderr.write("
        '\'{"kinds": ["MeasurementError"], "message": "refused"}\'); sys.exit(1)'
    )
    settings = ServerSettings(
        token=TOKEN, database=IN_MEMORY, scheduler="threads",
        measure_command=(sys.executable, "-c", program),
    )  # fmt: skip
    headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    app = create_app(settings)
    with TestClient(app, "http://localhost", raise_server_exceptions=False) as client:
        yield lambda path, content: client.post(path, content=content, headers=headers)


def assert_refused(response, *statuses: int) -> None:
    assert response.status_code in statuses, response.text[:300]
    assert response.headers["Content-Type"] == "application/problem+json"
    assert len(response.content) < 50_000


@pytest.mark.parametrize("path", ["/v1/plans", "/v1/profiles"])
@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED.keys())
def test_what_is_not_json_is_refused(post, path, content):
    response = post(path, content)
    assert_refused(response, 400)
    assert response.json()["type"].endswith(":malformed-json")


@pytest.mark.parametrize("path", ["/v1/plans", "/v1/profiles"])
@pytest.mark.parametrize("content", NOT_A_REQUEST)
def test_what_is_not_a_request_is_refused(post, path, content):
    assert_refused(post(path, content.encode()), 422)


def plan_request() -> dict[str, Any]:
    return {
        "profile": example_profile(),
        "cluster": {"devices": [{"name": "a"}, {"name": "b"}], "levels": [{"group_size": 2}]},
        "options": {},
    }


@pytest.mark.parametrize("path", PROFILE_PATHS)
def test_no_value_in_a_profile_breaks_the_server(post, path):
    for literal in LITERALS:
        request = plan_request()
        response = post("/v1/plans", body_with(request, f"profile.{path}", literal))
        assert response.status_code in (201, 422), (literal[:40], response.text[:300])
        assert len(response.content) < 500_000


@pytest.mark.parametrize("path", REQUEST_PATHS)
def test_no_value_in_a_request_breaks_the_server(post, path):
    for literal in LITERALS:
        response = post("/v1/plans", body_with(plan_request(), path, literal))
        assert response.status_code in (201, 422), (literal[:40], response.text[:300])


@pytest.mark.parametrize("path", MEASURE_PATHS)
def test_no_value_of_a_model_breaks_the_server(post, path):
    for literal in LITERALS:
        assert_refused(post("/v1/plans", body_with(measure_example(), path, literal)), 422)


def test_the_largest_numbers_accepted_can_be_planned(post):
    """Cause: sums and products of numbers near the limits became infinite, or overflowed."""
    for seconds, size in (("1e300", "1"), ("1", str(2**62)), ("1e308", str(10**300))):
        request = plan_request()
        text = json.dumps(request)
        text = text.replace("0.001,", f"{seconds},").replace("0.003,", f"{seconds},")
        text = text.replace("1048576", size).replace("4194304", size)
        response = post("/v1/plans", text.encode())
        assert response.status_code in (201, 422), response.text[:300]


@pytest.mark.timeout(25)
def test_many_layers_of_one_name_are_refused_quickly(post):
    """Cause: the search for the name given twice was quadratic, and blocked the event loop."""
    request = plan_request()["profile"]
    layer = {"forward": {"median_s": 1}, "backward": {"median_s": 1}}
    names = [str(index) for index in range(60_000)]
    request["layers"] = [{"layer": {"name": name}, **layer} for name in [*names, names[-1]]]
    request["boundaries"] = [{"after": after} for after in range(len(names))]
    assert_refused(post("/v1/profiles", json.dumps(request).encode()), 422)


def test_thousands_of_errors_make_a_short_answer(post):
    request = measure_example()
    request["sample"]["inputs"] = {"x" * 5000: {"shape": [-1] * 8, "y" * 5000: 1}}
    request["cluster"] = {"devices": [{}] * 50_000}
    assert_refused(post("/v1/plans", json.dumps(request).encode()), 422)
