"""What a request names has a length, and so has what it makes the service store.

Cause: 5.5 kB of requests grew the database by 157 MiB, because every plan repeats the names of its
profile, which had no length; and 5,000 levels of 2^i devices were answered with a 500.
"""

from __future__ import annotations

from typing import Any

import pytest

from stagewright.api.planning.decision import MAX_RECORD_BYTES
from stagewright.core.document import MAX_NAME
from stagewright.core.plan.plan import MAX_CONSTRAINTS

BOUNDS = {"maxLength", "enum", "const", "pattern", "format"}


def unbounded_texts(schema: Any, path: str = "") -> list[str]:
    found = []
    if isinstance(schema, dict):
        if schema.get("type") == "string" and BOUNDS.isdisjoint(schema):
            found.append(path)
        # Keys of objects are texts of the sender's, too.
        free = schema.get("additionalProperties")
        if isinstance(free, dict) and not {"propertyNames", "maxProperties"} & {*schema}:
            found.append(path + " (keys)")
        schema = schema.items()
    elif isinstance(schema, list):
        schema = enumerate(schema)
    else:
        return found
    for key, inner in schema:
        found += unbounded_texts(inner, f"{path}/{key}")
    return found


def bodies(document: dict[str, Any]) -> dict[str, Any]:
    """Every schema of a JSON body that a client may send, by its request or its name."""
    operations = {
        f"{method} {path}": operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if "requestBody" in operation
    }
    found = {
        name: operation["requestBody"]["content"]["application/json"]["schema"]
        for name, operation in operations.items()
        if "application/json" in operation["requestBody"]["content"]
    }
    waiting = list(found.values())
    while waiting:
        schema = waiting.pop()
        if isinstance(schema, dict) and "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            if name not in found:
                found[name] = document["components"]["schemas"][name]
                waiting.append(found[name])
        parts = schema.values() if isinstance(schema, dict) else schema
        waiting += [part for part in parts if isinstance(part, dict | list)]
    return found


def test_every_text_in_a_request_has_a_length(client):
    found = bodies(client.get("/openapi.json").json())
    assert {"post /v1/plans", "patch /v1/plans/{plan_id}", "post /v1/projects"} <= found.keys()
    # Arguments of factories are bounded together, where the factory's own schema is checked.
    assert [
        f"{name}{place}"
        for name, schema in found.items()
        for place in unbounded_texts(schema)
        if f"{name}{place}" != "FactoryCall/properties/arguments (keys)"
    ] == []


def test_a_name_is_refused_one_character_beyond_its_length(client, profile):
    def post(length: int) -> Any:
        body = {"profile": {**profile, "model": "m" * length}, "cluster": "2x24GB"}
        return client.post("/v1/plans", json=body)

    assert post(MAX_NAME).status_code == 201
    refused = post(MAX_NAME + 1)
    assert refused.status_code == 422
    assert refused.json()["errors"][0]["pointer"] == "/profile/model"


def test_a_short_request_adds_little_to_the_database(client, profile):
    """A stored profile may be large; what a hundred bytes copy of it into a plan may not."""
    modules = [f"{number}{'m' * 400}" for number in range(MAX_RECORD_BYTES // 400)]
    profile["layers"][0]["layer"]["module_fqns"] = modules
    stored = client.post("/v1/profiles", json=profile)
    assert stored.status_code == 201
    body = {"profile_id": stored.json()["id"], "cluster": "2x24GB"}
    refused = client.post("/v1/plans", json=body)
    assert refused.status_code == 422
    assert "at most 4.0 MiB are stored" in refused.json()["detail"]
    # Kinds of devices are as long as their shorthand, and every device is named after its kind.
    long_kind = "0" * 28 + "24." + "0" * 30 + "GB"
    body = {"profile": profile, "cluster": f"16384x{long_kind}"}
    assert client.post("/v1/plans", json=body).status_code == 422


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        ("pins", [{"layer": "0", "stage": 0}] * (MAX_CONSTRAINTS + 1), "at most 10000"),
        ("together", [["0", "0"]] * (MAX_CONSTRAINTS + 1), "at most 10000"),
        ("no_cut_after", ["0"] * (MAX_CONSTRAINTS + 1), "at most 10000"),
        ("pins", [{"layer": "0", "stage": 10**30}], "65536"),
        ("max_stages", 10**30, "1048576"),
        ("max_replicas", 10**30, "1048576"),
    ],
)
def test_options_have_bounds(client, profile, place, value, says):
    body = {"profile": profile, "cluster": "2x24GB", "options": {place: value}}
    response = client.post("/v1/plans", json=body)
    assert response.status_code == 422
    assert response.json()["errors"][0]["pointer"].startswith(f"/options/{place}")
    assert says in response.json()["detail"]


@pytest.mark.parametrize(
    ("levels", "says"),
    [
        ([{"group_size": 2**power} for power in range(1, 5000)], "at most 32"),
        ([{"group_size": 2}] * 33, "at most 32"),
        ([{"group_size": 10**30}], "1073741824"),
    ],
)
def test_links_have_bounds(client, profile, levels, says):
    cluster = {"devices": [{"name": "a"}, {"name": "b"}], "levels": levels}
    response = client.post("/v1/plans", json={"profile": profile, "cluster": cluster})
    assert response.status_code == 422
    assert says in response.json()["detail"]
