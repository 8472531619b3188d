"""Where the service is, who asks, and what says what the model is."""

from __future__ import annotations

import os
import sys

import httpx2
import pytest
import torch

from stagewright import Client
from stagewright.client.model_sources import describe_model
from stagewright.client.settings import ClientSettings
from stagewright.core.errors import CaptureError, InvalidInput
from stagewright.core.requests.requests import FactoryCall

ENVIRONMENT = {"STAGEWRIGHT_SERVER": "https://planner.example.com/a/", "STAGEWRIGHT_TOKEN": "t1"}


def test_what_is_given_goes_before_what_the_environment_says():
    found = ClientSettings.from_environment(None, None, environment=ENVIRONMENT)
    assert (found.url, found.token) == ("https://planner.example.com/a", "t1")
    found = ClientSettings.from_environment("http://other:1", "t2", environment=ENVIRONMENT)
    assert (found.url, found.headers["Authorization"]) == ("http://other:1", "Bearer t2")
    found = ClientSettings.from_environment(None, None, environment={})
    assert (found.url, "Authorization" in found.headers) == ("http://127.0.0.1:8000", False)


@pytest.mark.parametrize(
    "url", ["planner:8000", "ftp://x", "http://", "http://u:p@x", "http://x?a=1", "http://x:y"]
)
def test_what_is_no_address_is_refused(url):
    with pytest.raises(InvalidInput, match="service URL"):
        ClientSettings.from_environment(url, None, environment={})


@pytest.mark.parametrize(
    ("url", "proxied"),
    [
        ("http://127.0.0.1:8000", False),
        ("http://localhost", False),
        ("http://[::1]:8000", False),
        ("http://127.8.0.1", False),
        ("https://planner.example.com", True),
        ("http://10.0.0.1", True),
    ],
)
def test_proxies_are_for_other_machines(url, proxied, monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setitem(os.environ, "ALL_PROXY", "http://127.0.0.1:9")
    with Client(url) as client:
        mounted = client._http._transport_for_url(httpx2.URL(url))
        assert (mounted is not client._http._transport) == proxied


def test_a_path_before_the_routes_is_kept():
    seen = []

    def handle(request: httpx2.Request) -> httpx2.Response:
        seen.append(str(request.url))
        return httpx2.Response(200, json={"jobs": []})

    with Client("http://test/planner/", transport=httpx2.MockTransport(handle)) as client:
        client.jobs(state="queued", limit=3)
    assert seen == ["http://test/planner/v1/jobs?state=queued&limit=3"]


def test_ids_cannot_lead_elsewhere():
    seen = []

    def handle(request: httpx2.Request) -> httpx2.Response:
        seen.append(request.url.raw_path)
        return httpx2.Response(404)

    with Client("http://test", transport=httpx2.MockTransport(handle)) as client:
        for name in ("../api-keys", "a?b=1", "a#b"):
            with pytest.raises(Exception, match="404"):
                client.get_plan(name)
        with pytest.raises(InvalidInput, match="empty id"):
            client.revoke_key("")
    assert seen == [b"/v1/plans/..%2Fapi-keys", b"/v1/plans/a%3Fb%3D1", b"/v1/plans/a%23b"]


def test_each_way_of_saying_a_model():
    assert describe_model({"family": "mlp"}) == {"model": {"family": "mlp"}}
    assert describe_model("profile_" + "0" * 32) == {"profile_id": "profile_" + "0" * 32}
    assert describe_model("graph_" + "a" * 32) == {"graph_id": "graph_" + "a" * 32}
    assert describe_model(FactoryCall(name="mine")) == {
        "factory": {"name": "mine", "arguments": {}}
    }


class Branching(torch.nn.Module):
    """Its Python decides by values, so it does not go without its code."""

    def forward(self, x):
        return x * 2 if float(x.sum()) > 0 else x


@pytest.mark.parametrize(
    ("model", "sample", "error", "said"),
    [
        (torch.nn.Linear(2, 2), None, InvalidInput, "capturing a module needs a sample"),
        (Branching(), torch.ones(2), CaptureError, r"stagewright\.profile\(model, sample\)"),
        ({"family": "mlp"}, torch.ones(2), InvalidInput, "is a description"),
        ("gpt3000", None, InvalidInput, "unknown model"),
        ("graph.json", None, InvalidInput, "cannot read graph.json"),
        ("profile_" + "0" * 32, {"inputs": {}}, InvalidInput, "leave the sample out"),
        ("plan_" + "0" * 32, None, InvalidInput, "unknown model"),
        (3, None, InvalidInput, "an int does not describe a model"),
        ([], None, InvalidInput, "a list does not describe a model"),
        ({"config": {}}, None, InvalidInput, "has no 'family'"),
    ],
)
def test_what_says_of_no_model_is_refused_before_anything_is_sent(model, sample, error, said):
    with pytest.raises(error, match=said):
        describe_model(model, sample)


def test_an_exported_program_without_torch_is_told_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "stagewright.capture.exported_program", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ModuleNotFoundError, match=r"capturing x/model\.pt2 needs torch.*\[torch\]"):
        describe_model("x/model.pt2")


def test_an_exported_program_has_its_own_sample(tmp_path):
    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(4, 2),)), path)
    with pytest.raises(InvalidInput, match="leave the sample out"):
        describe_model(path, torch.ones(2))
    assert describe_model(path)["graph"]["model"] == "Linear"


@pytest.mark.parametrize("name", ["net.pt", "weights/net.pth", "model.safetensors"])
def test_a_file_of_weights_is_not_taken_for_a_published_models_name(name):
    with pytest.raises(InvalidInput, match=r"neither a \.pt2 nor .* torch\.export\.save"):
        describe_model(name)
