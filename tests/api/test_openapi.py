"""The OpenAPI document is complete, and its examples work as they stand."""

from __future__ import annotations

from typing import Any

import pytest

from stagewright.api.http.examples import PLAN_EXAMPLES, PROFILE_EXAMPLES


@pytest.fixture
def document(client) -> dict[str, Any]:
    answer: dict[str, Any] = client.get("/openapi.json").json()
    return answer


def examples(document: dict[str, Any]) -> dict[tuple[str, str], Any]:
    return {
        (path, name): example["value"]
        for path, methods in document["paths"].items()
        if "requestBody" in methods.get("post", {})
        for content in [methods["post"]["requestBody"]["content"]]
        for name, example in content.get("application/json", {"examples": {}})["examples"].items()
    }


def test_every_post_has_examples(document):
    posts = {path for path, methods in document["paths"].items() if "post" in methods}
    bare = {"/v1/jobs/{job_id}/cancel"}
    assert posts - bare == {path for path, _ in examples(document)}
    assert {"/v1/plans", "/v1/profiles", "/v1/api-keys"} <= posts
    assert len(examples(document)) >= len(PLAN_EXAMPLES) + len(PROFILE_EXAMPLES)


@pytest.mark.parametrize("name", [name for name in PLAN_EXAMPLES if name != "measure"])
def test_a_plan_example_is_answered(make_client, forked_children, document, name):
    client = make_client(**forked_children)
    response = client.post("/v1/plans", json=examples(document)["/v1/plans", name])
    assert response.status_code == 201, response.text
    assert response.json()["status"] == ("infeasible" if name == "infeasible" else "planned")


def test_the_example_of_a_graph_is_kept(client, document):
    response = client.post("/v1/graphs", json=examples(document)["/v1/graphs", "graph"])
    assert response.status_code == 201, response.text


def test_the_example_of_a_simulation_is_answered(client, document):
    request = examples(document)["/v1/simulations", "balance"]
    response = client.post("/v1/simulations", json=request)
    assert (response.status_code, response.json()["status"]) == (200, "simulated")


@pytest.mark.parametrize("name", PROFILE_EXAMPLES)
def test_a_profile_example_is_kept(client, document, name):
    response = client.post("/v1/profiles", json=examples(document)["/v1/profiles", name])
    assert response.status_code == 201, response.text


def test_the_example_of_a_key_is_answered(client, document):
    response = client.post("/v1/api-keys", json=examples(document)["/v1/api-keys", "plans"])
    assert response.status_code == 201, response.text


@pytest.mark.slow
def test_the_measuring_example_is_measured_in_a_child(make_client, forked_children, document):
    client = make_client(**forked_children)
    response = client.post("/v1/plans", json=examples(document)["/v1/plans", "measure"])
    assert response.status_code == 201, response.text
    body = response.json()
    assert body["status"] == "planned"
    assert body["plan"]["spec"]["family"] == "mlp"
    assert not body["plan"]["estimated"]
    profile = client.get(f"/v1/profiles/{body['profile_id']}").json()["profile"]
    assert profile["provenance"]["source"] == "measured"
    assert profile["provenance"]["device"] == "cpu"


def test_every_operation_announces_problems_and_the_token(document):
    assert document["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    assert document["security"] == [{"token": []}]
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert "application/problem+json" in operation["responses"]["default"]["content"]
            assert "security" not in operation, path


def test_the_document_is_small_and_makes_good_clients(document):
    operations = [
        operation for methods in document["paths"].values() for operation in methods.values()
    ]
    names = [operation["operationId"] for operation in operations]
    assert len(operations) <= 29
    assert len(set(names)) == len(names)
    assert {"create_plan", "get_plan", "list_plans", "create_graph", "get_capabilities"} <= {*names}
    for name in names:
        assert name.isidentifier()
        assert "v1" not in name
    assert [server["url"] for server in document["servers"]] == ["/"]


def test_every_reference_leads_somewhere(document):
    def references(value: Any):
        if isinstance(value, dict):
            yield from [value["$ref"]] if isinstance(value.get("$ref"), str) else []
            for inner in value.values():
                yield from references(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from references(inner)

    found = set(references(document))
    assert "#/components/schemas/ProblemDocument" in found
    for reference in found:
        here: Any = document
        for part in reference.removeprefix("#/").split("/"):
            here = here[part]


def test_the_cluster_may_be_written_as_text(document):
    cluster = document["components"]["schemas"]["PlanRequest"]["properties"]["cluster"]
    assert {"type": "string", "maxLength": 1000} in cluster["anyOf"]
