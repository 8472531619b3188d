"""Every error is a problem document, and names the field."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from stagewright.api.http.examples import measure_example
from stagewright.api.store.errors import StoreUnavailable
from stagewright.api.store.store import Store


def problem(response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["Content-Type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert body["status"] == status
    assert body["type"].startswith("urn:problem-type:stagewright:")
    assert body["title"]
    assert body["detail"]
    return body


def changed(path: str, value: Any) -> dict[str, Any]:
    """The measuring example with one value set; ``...`` deletes it."""
    request = measure_example()
    *parents, last = path.split(".")
    here: Any = request
    for part in parents:
        here = here[int(part) if isinstance(here, list) else part]
    if value is ...:
        del here[last]
    else:
        here[int(last) if isinstance(here, list) else last] = value
    return request


FIELDS = [
    ("cluster", ..., "/cluster", "required"),
    ("cluster", "2 big ones", "/cluster", "4x24GB"),
    ("cluster", "0xcpu", "/cluster", "at least one"),
    ("cluster", "16385xcpu", "/cluster", "limited to 16384"),
    ("cluster", "9" * 900, "/cluster", "4x24GB"),
    ("cluster", "9" * 6000, "/cluster", "at most 1000"),
    ("cluster", 7, "/cluster", "valid"),
    ("cluster", {"devices": []}, "/cluster/devices", "at least 1"),
    ("cluster", {"devices": [{"nam": "a"}]}, "/cluster/devices/0/nam", "'nam'"),
    ("cluster", {"devices": [{"name": "a"}] * 2}, "/cluster", "unique"),
    ("cluster", {"schema_version": "x", "devices": []}, "/cluster", "stagewright.cluster/1"),
    ("sample.inputs.input.shape.0", -8, "/sample/inputs/input/shape/0", "greater than"),
    ("sample.inputs.input.shape", [], "/sample/inputs/input/shape", "at least 1"),
    ("sample.inputs.input.shpe", [1], "/sample/inputs/input/shpe", "'shpe'"),
    ("sample.inputs.input.dtype", "float", "/sample/inputs/input/dtype", "float32"),
    ("sample.inputs.input.dtype", "int64", "/sample/inputs/input", "floating"),
    ("sample.inputs", {"a/b~c": {"shape": [0]}}, "/sample/inputs/a~1b~0c/shape/0", "greater"),
    ("sample.inputs", {"family": {"shape": [0]}}, "/sample/inputs/family/shape/0", "greater"),
    ("sample.inputs", {}, "/sample/inputs", "at least 1"),
    ("model.family", "mpl", "/model/family", "'mpl'; known are 'mlp', 'resnet', 'unet', 'gpt2'"),
    ("model.family", ..., "/model/family", "family"),
    ("model.family", None, "/model/family", "family"),
    ("model.family", ["mlp"], "/model/family", "family"),
    (
        "model.config.hiden_size",
        1,
        "/model/config/hiden_size",
        "unknown field 'hiden_size'; did you mean 'hidden_size'?",
    ),
    ("model.config.activation", 1, "/model/config/activation", "known are "),
    ("model.config.hidden_size", -1, "/model/config/hidden_size", "greater than"),
    ("model.mlp", 1, "/model/mlp", "unknown field 'mlp'"),
    ("model", "mlp", "/model", "unknown model 'mlp'"),
    ("model", 7, "/model", "valid dictionary"),
    ("profiling.device", "tpu", "/profiling/device", "match"),
    ("options", {"num_microbatches": 0}, "/options/num_microbatches", "greater than"),
    ("optoins", {}, "/optoins", "unknown field 'optoins'; did you mean 'options'?"),
    ("options", {"shedule": "1f1b"}, "/options/shedule", "did you mean 'schedule'?"),
    ("profiling.budget", 1, "/profiling/budget", "did you mean 'budget_s'?"),
    ("sample.inputs.input.shap", [1], "/sample/inputs/input/shap", "did you mean 'shape'?"),
    ("profile_id", "profile_1", "/model", "exactly one of"),
    ("model", ..., "", "exactly one of"),
]


@pytest.mark.parametrize(("path", "value", "pointer", "words"), FIELDS)
def test_the_field_at_fault_is_named(client, path, value, pointer, words):
    body = problem(client.post("/v1/plans", json=changed(path, value)), 422)
    (error,) = [error for error in body["errors"] if error["pointer"] == pointer]
    assert words in error["detail"]


def test_every_field_at_fault_is_named(client):
    request = changed("sample.inputs.input.shape", [-1, 8, -2])
    request["options"] = {"scheduel": "1f1b"}
    body = problem(client.post("/v1/plans", json=request), 422)
    assert [error["pointer"] for error in body["errors"]] == [
        "/sample/inputs/input/shape/0",
        "/sample/inputs/input/shape/2",
        "/options/scheduel",
    ]


def test_a_tag_is_dropped_inside_a_profile_as_well(client, profile):
    profile["spec"] = {"family": "gpt2", "config": {"n_embd": 7, "n_head": 2}}
    body = problem(client.post("/v1/profiles", json=profile), 422)
    assert body["errors"][0]["pointer"] == "/spec/config"
    assert "multiple of n_head" in body["errors"][0]["detail"]


def test_a_profile_that_contradicts_itself_is_refused(client, profile):
    profile["layers"][1]["layer"]["name"] = profile["layers"][0]["layer"]["name"]
    body = problem(client.post("/v1/profiles", json=profile), 422)
    assert "blocks.0" in body["errors"][0]["detail"]


def test_sample_without_model_is_refused(client, profile):
    request = {"profile": profile, "cluster": "2xcpu", "sample": measure_example()["sample"]}
    body = problem(client.post("/v1/plans", json=request), 422)
    assert body["errors"][0]["pointer"] == "/sample"


def test_what_the_planner_refuses_is_a_problem(client, profile):
    profile["layers"][0]["forward"]["median_s"] = 1e300
    body = problem(client.post("/v1/plans", json={"profile": profile, "cluster": "2xcpu"}), 422)
    assert "the profile's times add up to" in body["detail"]


@pytest.mark.in_threads
def test_planning_for_minutes_is_refused_beforehand(client, profile, monkeypatch):
    monkeypatch.setattr("stagewright.api.planning.requests.is_available", lambda: True)
    options = {"num_microbatches": 2**20}
    request = {"profile": profile, "cluster": "5xcpu", "options": options}
    monkeypatch.setattr(
        "stagewright.api.planning.decision.plan", lambda *_, **__: 1 / 0
    )  # "planned"
    problem(client.post("/v1/plans", json=request), 500)
    profile["layers"].append({**profile["layers"][-1], "layer": {"name": "blocks.4"}})
    profile["boundaries"].append({**profile["boundaries"][-1], "after": 3})
    body = problem(client.post("/v1/plans", json=request), 422)
    assert body["errors"][0]["pointer"] == "/options/num_microbatches"


def test_an_unknown_profile_id_is_named(client):
    request = {"profile_id": "profile_0", "cluster": "2xcpu"}
    body = problem(client.post("/v1/plans", json=request), 422)
    assert body["errors"][0]["pointer"] == "/profile_id"


def test_a_sample_too_large_is_refused_before_measuring(make_client, child):
    client = make_client(measure_command=child("raise SystemExit('measured')"))
    tensor = {"shape": [2**20, 100]}
    request = changed("sample.inputs", {name: tensor for name in "abc"})
    body = problem(client.post("/v1/plans", json=request), 422)
    (error,) = body["errors"]
    assert error["pointer"] == "/sample"
    assert "1.2 GiB" in error["detail"]
    assert "1.0 GiB" in error["detail"]


@pytest.mark.parametrize("limit", ["0", "501", "-1", "x", "", "9" * 5000, "1e3"])
def test_a_query_parameter_is_named(client, limit):
    body = problem(client.get("/v1/plans", params={"limit": limit}), 422)
    assert body["errors"][0]["parameter"] == "limit"


@pytest.mark.parametrize(
    ("path", "parameter", "words"),
    [
        ("/v1/plans?limt=3&limit=2", "limt", "did you mean 'limit'?"),
        ("/v1/clusters?devices=2xcpu&device=2xcpu", "device", "did you mean 'devices'?"),
        ("/v1/capabilities?verbose", "verbose", "there is none here"),
        ("/v1/profiles?" + "&".join(f"x{n}=1" for n in range(60)), "x0", "known are cursor, limit"),
    ],
)
def test_a_query_parameter_that_is_unknown_is_not_passed_over(client, path, parameter, words):
    body = problem(client.get(path), 422)
    assert body["errors"][0]["parameter"] == parameter
    assert words in body["errors"][0]["detail"]
    assert len(body["errors"]) <= 50


def test_a_path_that_is_misspelt_says_the_nearest(client):
    detail = problem(client.get("/v1/plan"), 404)["detail"]
    assert "Did you mean /v1/plans?" in detail
    assert "/openapi.json" in problem(client.get("/nowhere"), 404)["detail"]
    assert "Allowed: GET, POST." in problem(client.put("/v1/plans"), 405)["detail"]
    assert "plan_0" in problem(client.get("/v1/plans/plan_0"), 404)["detail"], "its own words stay"


@pytest.mark.parametrize("path", ["/v1/plans/plan_0", "/v1/profiles/profile_0", "/nowhere",
                                  "/v1/plans/", "/docs", "/redoc", "/v1/plans/%00",
                                  "/v1/plans/%ff", "/v1/plans/a%2Fb"])  # fmt: skip
def test_what_is_not_there_is_a_problem(client, path):
    problem(client.get(path), 404)


@pytest.mark.parametrize(("method", "path"), [("PUT", "/v1/plans"), ("PUT", "/v1/plans/plan_0"),
                                              ("POST", "/healthz"), ("TRACE", "/v1/plans"),
                                              ("BREW", "/v1/profiles")])  # fmt: skip
def test_a_method_that_is_not_allowed_is_a_problem(client, method, path):
    response = client.request(method, path)
    problem(response, 405)
    assert response.headers["Allow"]


@pytest.mark.parametrize(
    "content_type",
    [None, "", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data",
     "application/jsonx", "json", "text/json", "application/xml; a=application/json"],
)  # fmt: skip
def test_another_content_type_is_a_problem(client, content_type):
    headers = {} if content_type is None else {"Content-Type": content_type}
    response = client.post("/v1/plans", content=b"{}", headers=headers)
    assert problem(response, 415)["detail"].endswith("'Content-Type: application/json'.")


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "APPLICATION/JSON"])
def test_json_by_another_spelling_is_read(client, content_type):
    response = client.post("/v1/plans", content=b"{}", headers={"Content-Type": content_type})
    problem(response, 422)


@pytest.mark.in_threads
def test_a_bug_is_a_problem_that_tells_nothing(client, profile, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("secret")

    monkeypatch.setattr("stagewright.api.planning.decision.plan", broken)
    response = client.post("/v1/plans", json={"profile": profile, "cluster": "2xcpu"})
    problem(response, 500)
    assert "secret" not in response.text


def failing_child(error: str) -> str:
    return (
        "import sys; sys.stderr.write('secret\\n"
        f'{{"kinds": ["{error}"], "message": "blocks.3 failed"}}\\n\'); sys.exit(1)'
    )


@pytest.mark.parametrize(
    ("program", "status", "kind", "words"),
    [
        (failing_child("InvalidInput"), 422, "invalid-input", "blocks.3 failed"),
        (failing_child("CaptureError"), 422, "capture-failed", "blocks.3 failed"),
        (failing_child("MeasurementError"), 422, "measurement-failed", "blocks.3 failed"),
        (failing_child("ZeroDivisionError"), 422, "measurement-failed", "log"),
        ("pass", 422, "measurement-failed", "no valid profile"),
        ("import time; time.sleep(60)", 504, "deadline-exceeded", "post the profile"),
    ],
)
def test_a_failed_measurement_is_a_problem(make_client, child, program, status, kind, words):
    deadline_s = 1.0 if status == 504 else 60.0
    client = make_client(measure_command=child(program), measure_deadline_s=deadline_s)
    response = client.post("/v1/plans", json=measure_example())
    body = problem(response, status)
    assert body["type"].endswith(f":{kind}")
    assert words in body["detail"]
    assert "secret" not in response.text


@pytest.mark.parametrize(
    ("path", "value", "pointer", "words"),
    [
        ("sample.inputs", {"foo": {"shape": [8, 64]}}, "/sample/inputs", "takes input, not 'foo'"),
        ("sample.inputs.input.shape", [8, 63], "/sample/inputs", "(micro-batch, 64)"),
        ("sample.target", {"shape": [8]}, "/sample/target", "dtype int64"),
        ("profiling.device", "gpu", "/profiling/device", "cuda"),
    ],
)
def test_the_field_at_fault_is_named_also_where_only_measuring_finds_it(
    make_client, forked_children, path, value, pointer, words
):
    client = make_client(**forked_children)
    body = problem(client.post("/v1/plans", json=changed(path, value)), 422)
    (error,) = body["errors"]
    assert error["pointer"] == pointer
    assert words in error["detail"]


def test_without_torch_the_way_out_is_said(client, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    body = problem(client.post("/v1/plans", json=measure_example()), HTTPStatus.NOT_IMPLEMENTED)
    assert "post a profile instead, or install stagewright[torch]" in body["detail"]


def test_a_database_that_is_gone_makes_the_server_not_ready(make_client):
    class Gone(Store):
        def check(self):
            raise OSError("secret")

    response = make_client(store=Gone(":memory:"), authorized=False).get("/readyz")
    problem(response, 503)
    assert "secret" not in response.text


def test_where_a_database_is_that_does_not_answer_is_for_the_log_alone(make_client, caplog):
    class Gone:
        @property
        def documents(self):
            raise StoreUnavailable("database postgresql://secret-host: connection refused")

        def close(self):
            pass

    response = make_client(store=Gone()).get("/v1/plans")
    body = problem(response, 503)
    assert body["type"].endswith(":database-unreachable")
    assert "secret" not in response.text
    assert "secret-host" in caplog.text


def test_a_full_disk_is_a_503_and_what_is_stored_stays_readable(
    make_client, profile, tmp_path: Path, caplog
):
    """A file that has reached its greatest number of pages is to SQLite as a full disk is."""
    store = Store(tmp_path / "store.db")
    client = make_client(store=store)
    kept = client.post("/v1/profiles", json=profile).headers["Location"]
    engine = store._database.engine
    event.listen(engine, "checkout", lambda driver, *_: driver.execute("PRAGMA max_page_count = 1"))
    profile["layers"][0]["layer"]["module_fqns"] = [f"{n}{'m' * 400}" for n in range(1000)]
    response = client.post("/v1/profiles", json=profile)
    body = problem(response, 503)
    assert body["type"].endswith(":database-unreachable")
    assert "refuses to write" in body["detail"]
    assert "database or disk is full" not in response.text
    assert "database or disk is full" in caplog.text
    assert response.headers["Retry-After"]
    assert client.get(kept).status_code == 200
    assert len(client.get("/v1/profiles").json()["profiles"]) == 1
