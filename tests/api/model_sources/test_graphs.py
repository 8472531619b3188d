"""Graphs over HTTP: kept, estimated without being run, refused with their field named."""

from __future__ import annotations

import copy
import io
import zipfile
from typing import Any

import pytest

from stagewright.api.http.examples import example_graph
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.graph.graph import Graph
from stagewright.core.plan.plan import Plan
from stagewright.core.requests.requests import EstimateOptions, EstimateRequest
from stagewright.planner.plan import plan as make_plan
from stagewright.profiler.estimates.worker import estimate


@pytest.fixture
def graph() -> dict[str, Any]:
    return copy.deepcopy(example_graph())


@pytest.fixture
def estimating(make_client, child):
    """A client whose service estimates everything as the library estimates the example."""
    request = EstimateRequest(
        graph=Graph.model_validate(example_graph()),
        cluster=Cluster.parse("2xH100"),
        estimate=EstimateOptions(device="H100"),
    )
    text = estimate(request).model_dump_json()
    return make_client(
        estimate_command=child(f"import sys; sys.stdin.read(); sys.stdout.write({text!r})")
    )


def test_a_graph_is_estimated_in_a_sandboxed_child_and_planned_as_the_library_does(client, graph):
    request = {"graph": graph, "cluster": "2xH100"}
    response = client.post("/v1/plans", json=request)
    assert response.status_code == 201, response.text
    read = Graph.model_validate(graph)
    expected = estimate(EstimateRequest(graph=read, cluster=Cluster.parse("2xH100")))
    assert Plan.model_validate(response.json()["plan"]) == make_plan(expected.profile, "2xH100")
    assert response.json()["plan"]["estimated"]
    assert client.get(f"/v1/graphs/{read.content_id()}").json()["graph"]["model"] == "TwoLayers"


def test_a_graph_may_be_stored_first_and_named(estimating, graph):
    stored = estimating.post("/v1/graphs", json=graph)
    assert stored.status_code == 201
    assert Graph.model_validate(
        estimating.get(stored.headers["Location"]).json()["graph"]
    ) == Graph.model_validate(graph)
    named = {"graph_id": stored.json()["id"], "cluster": "2xH100"}
    inline = {"graph": graph, "cluster": "2xH100"}
    first, second = (estimating.post("/v1/plans", json=body) for body in (named, inline))
    assert first.json() == second.json()
    assert second.headers["Stagewright-Reused"] == "plan"


def test_with_profiling_a_graph_is_measured_in_a_sandboxed_child(client, graph):
    stored = client.post("/v1/graphs", json=graph).json()
    body = {
        "graph_id": stored["id"],
        "profiling": {"device": "cpu", "budget_s": 0.1},
        "cluster": "2xcpu",
    }
    response = client.post("/v1/plans", json=body)
    assert response.status_code == 201, response.text
    profile = client.get(f"/v1/profiles/{response.json()['profile_id']}").json()["profile"]
    assert [entry["layer"]["name"] for entry in profile["layers"]] == ["first", "second"]
    assert profile["provenance"]["device"] == "cpu"
    assert "measured without the model's code" in " ".join(profile["notes"])
    again = client.post("/v1/plans", json={**body, "graph_id": None, "graph": graph})
    assert again.headers["Stagewright-Reused"] == "plan"


@pytest.fixture(scope="module")
def archive() -> bytes:
    """The first bytes of what ``torch.export.save`` writes, which nothing reads further."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as members:
        members.writestr("archive/models/model.json", "{}")
    return file.getvalue()


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("application/octet-stream", 415),
        ("application/zip; x=y", 415),
        ("application/x-www-form-urlencoded", 415),
        ("", 415),
        ("application/json", 400),
    ],
)
@pytest.mark.parametrize("path", ["/v1/graphs", "/v1/plans", "/v1/profile-jobs"])
def test_an_exported_program_is_refused_with_what_to_do_instead(
    client, archive, path, kind, status
):
    answer = client.post(path, content=archive, headers={"Content-Type": kind})
    assert answer.status_code == status
    assert "stagewright capture model.pt2 -o graph.json" in answer.json()["detail"]
    assert client.get("/v1/graphs").json()["graphs"] == []


def test_an_exported_program_in_a_form_is_refused_with_what_to_do_instead(client, archive):
    answer = client.post("/v1/graphs", files={"file": ("model.pt2", archive)})
    assert answer.status_code == 415
    assert "stagewright capture model.pt2 -o graph.json" in answer.json()["detail"]


def test_another_kind_of_upload_is_refused(client):
    as_form = client.post("/v1/graphs", data={"file": "x"})
    assert as_form.status_code == 415
    assert as_form.headers["Accept"] == "application/json"
    assert as_form.json()["detail"].endswith("/json'.")


def set_operator(graph):
    graph["operations"][1]["target"] = "aten.set_.source_Tensor"


def set_fill(graph):
    graph["state"][0]["fill"] = {"kind": "pickle"}


def set_layers(graph):
    graph["layers"] = graph["layers"] * 10_001
    graph["boundaries"] = [{"after": after} for after in range(20_001)]


def set_size(graph):
    graph["operations"][0]["outputs"][0]["shape"] = [2**41]


REFUSED = [
    (set_operator, "/graph", "not on the list"),
    (set_fill, "/graph/state/0/fill/kind", "'pickle'"),
    (set_layers, "/graph/layers", "at most 20000"),
    (set_size, "/graph/operations/0/outputs/0/shape/0", "less than or equal"),
    (lambda graph: graph.update(rebuildable=False), "/graph/rebuildable", "stagewright profile"),
    (lambda graph: graph["operations"][0].pop("layer"), "/graph/operations/0/layer", "required"),
    (lambda graph: graph["operations"][0].update(arguments=[{"code": "x"}]), "/graph", ""),
]


@pytest.mark.parametrize(("change", "pointer", "words"), REFUSED)
def test_what_is_no_graph_for_this_service_is_named(client, graph, change, pointer, words):
    change(graph)
    response = client.post("/v1/plans", json={"graph": graph, "cluster": "2xH100"})
    assert response.status_code == 422, response.text
    errors = response.json()["errors"]
    assert any(e["pointer"].startswith(pointer) and words in e["detail"] for e in errors), errors
    assert client.get("/v1/graphs").json()["graphs"] == []


@pytest.mark.parametrize(
    ("change", "pointer", "words"),
    [
        ({"profiling": {}, "estimate": {}}, "/profiling", "estimated or measured, not both"),
        ({"sample": {"inputs": {"x": {"shape": [1]}}}}, "/sample", "a graph has its own sample"),
        ({"graph_id": "graph_1"}, "/graph_id", "exactly one of"),
        ({"graph": None, "graph_id": "graph_1"}, "/graph_id", "no graph"),
    ],
)
def test_what_goes_with_a_graph_is_said(client, graph, change, pointer, words):
    response = client.post("/v1/plans", json={"graph": graph, "cluster": "2xH100", **change})
    assert response.status_code == 422
    (error,) = response.json()["errors"]
    assert error["pointer"] == pointer
    assert words in error["detail"]


def test_the_device_that_is_not_known_is_the_field_at_fault(make_client, forked_children, graph):
    client = make_client(**forked_children)
    request = {"graph": graph, "estimate": {"device": "nonesuch"}, "cluster": "2xH100"}
    response = client.post("/v1/plans", json=request)
    assert response.status_code == 422
    assert response.json()["errors"][0]["pointer"] == "/estimate/device"


def test_a_model_is_estimated_or_measured_and_not_both(client):
    request = {
        "model": {"family": "mlp"},
        "sample": {"inputs": {"input": {"shape": [8, 64]}}},
        "estimate": {},
        "profiling": {},
        "cluster": "2xH100",
    }
    response = client.post("/v1/plans", json=request)
    assert response.json()["errors"][0]["pointer"] == "/profiling"
