"""Stored plans side by side, and what the service says of itself."""

from __future__ import annotations

import importlib.util
from typing import get_args

import pytest

from stagewright.api.model_sources.families import OWN_FAMILIES
from stagewright.api.routes.catalogue import _families
from stagewright.core.cluster.accelerators import CATALOGUE
from stagewright.core.cluster.cluster import Cluster
from stagewright.profiler.models.transformer import TransformersSpec


@pytest.fixture
def ids(client, profile):
    profile["inputs"] = [{"name": "x", "shape": [4, 8], "dtype": "float32"}]
    return [
        client.post("/v1/plans", json={"profile": profile, "cluster": cluster}).json()["id"]
        for cluster in ("1x24GB", "2x24GB", "2x0.001GB")
    ]


def test_plans_are_put_side_by_side(client, ids):
    body = client.post("/v1/comparisons", json={"plan_ids": ids}).json()
    one, two, none = body["plans"]
    assert [entry["id"] for entry in body["plans"]] == ids
    assert (body["fastest"], body["same_profile"]) == (ids[1], True)
    assert one["times_slowest"] == 1.0
    assert two["times_slowest"] == pytest.approx(two["step_time_s"] / one["step_time_s"])
    assert two["samples_per_s"] == pytest.approx(8 * 4 / two["step_time_s"])
    stored = client.get(f"/v1/plans/{ids[1]}").json()["plan"]
    assert two["balance"] == stored["balance"]
    assert two["peak_memory_bytes"] == max(
        sum(stage["memory"].values()) for stage in stored["stages"]
    )
    assert (none["status"], none["step_time_s"]) == ("infeasible", None)
    assert none["message"]


def test_plans_of_different_batches_are_compared_per_sample(client, profile):
    """A step of twice the micro-batches takes longer, and less for each sample."""
    profile["inputs"] = [{"name": "x", "shape": [4, 8], "dtype": "float32"}]
    ids = []
    for count in (4, 16):
        options = {"num_microbatches": count}
        body = {"profile": profile, "cluster": "2x24GB", "options": options}
        ids.append(client.post("/v1/plans", json=body).json()["id"])
    body = client.post("/v1/comparisons", json={"plan_ids": ids}).json()
    few, many = body["plans"]
    assert many["step_time_s"] > few["step_time_s"]
    assert body["fastest"] == many["id"]
    assert few["times_slowest"] == 1.0
    assert many["times_slowest"] == pytest.approx(few["samples_per_s"] / many["samples_per_s"])


@pytest.mark.parametrize(
    ("plan_ids", "pointer"),
    [
        (["plan_1"], "/plan_ids"),
        ([f"plan_{number}" for number in range(9)], "/plan_ids"),
        (["plan_1", "plan_1"], "/plan_ids"),
        (["plan_1", "plan_2"], "/plan_ids/0"),
    ],
)
def test_the_field_at_fault_is_named(client, plan_ids, pointer):
    response = client.post("/v1/comparisons", json={"plan_ids": plan_ids})
    assert response.status_code == 422
    assert response.json()["errors"][0]["pointer"] == pointer


def test_the_catalogues(client):
    names = [entry["name"] for entry in client.get("/v1/capabilities").json()["accelerators"]]
    assert names == [entry.name for entry in CATALOGUE]
    cluster = client.get("/v1/clusters", params={"devices": "2x2x24GB"}).json()
    assert cluster == Cluster.parse("2x2x24GB").model_dump(mode="json")
    wrong = client.get("/v1/clusters", params={"devices": "big ones"})
    assert wrong.json()["errors"][0]["parameter"] == "devices"


def test_a_family_says_what_its_configuration_may_be(client):
    families = client.get("/v1/capabilities").json()["model_families"]
    assert {"mlp", "resnet", "gpt2", "llama", "t5", "vit"} <= {f["family"] for f in families}
    (gpt2,) = (family for family in families if family["family"] == "gpt2")
    schema = gpt2["config_schema"]
    assert schema["properties"]["n_layer"]["maximum"] == 256
    assert not schema["additionalProperties"]
    assert any(entry["name"] == "gpt2-xl" for entry in gpt2["published"])


def test_a_family_that_cannot_be_built_here_is_refused_before_anything_is_started(
    make_client, child, monkeypatch
):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "transformers" else found(name)
    )
    _families.cache_clear()
    client = make_client(
        **dict.fromkeys(("measure_command", "estimate_command"), child("raise SystemExit(9)"))
    )
    families = client.get("/v1/capabilities").json()["model_families"]
    _families.cache_clear()
    assert {f["family"] for f in families if f["available"]} == set(OWN_FAMILIES)
    assert "transformers" in next(f["reason"] for f in families if not f["available"])
    sample = {"inputs": {"input_ids": {"shape": [1, 8], "dtype": "int64", "fill": "zeros"}}}
    body = {"model": {"family": "gpt2"}, "cluster": "2xH100"}
    for how in ({"estimate": {}}, {"sample": sample}):
        answer = client.post("/v1/plans", json={**body, **how})
        assert answer.status_code == 422, answer.text
        (error,) = answer.json()["errors"]
        assert error["pointer"] == "/model/family"
        assert "install stagewright[hf]" in error["detail"]


def test_families_that_need_nothing_but_torch_are_known():
    others = {
        get_args(kind.model_fields["family"].annotation)[0] for kind in get_args(TransformersSpec)
    }
    assert len(others) >= 7
    assert set(_families(True)) - set(OWN_FAMILIES) == others


def test_capabilities_follow_what_is_installed(client, monkeypatch):
    here = client.get("/v1/capabilities").json()
    off = {tier["name"] for tier in here["models"] if not tier["available"]}
    assert off == {"factory"}, "what the settings have to register"
    assert here["limits"]["plan_deadline_s"] == 20.0
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    tiers = {tier["name"]: tier for tier in client.get("/v1/capabilities").json()["models"]}
    assert tiers["profile"]["available"]
    assert not tiers["graph"]["available"]
    assert "torch" in tiers["graph"]["reason"]
