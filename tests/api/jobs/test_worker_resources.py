"""What workers offer, and how long callers wait: words in, values out."""

from __future__ import annotations

import re

import pytest

from stagewright.api.jobs import worker_resources as offers_module
from stagewright.api.jobs.measurements import read_own_setup
from stagewright.api.jobs.requests import ProfileJobRequest, required_resource
from stagewright.api.jobs.worker_process import run_worker
from stagewright.api.jobs.worker_resources import detect_resources, device_kind_of, parse_resources
from stagewright.api.routes.plans import SLACK_S, wait_of
from stagewright.api.settings.settings import ServerSettings
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import InvalidInput
from stagewright.core.requests.requests import MeasureRequest

REQUEST = {
    "model": {"family": "mlp"},
    "sample": {"inputs": {"input": {"shape": [8, 64]}}},
}


@pytest.mark.parametrize(
    ("text", "offers"),
    [
        ("H200=1", {"H200": 1}),
        ("H200=1, cuda=2", {"H200": 1, "cuda": 2}),
        ("cpu", {"cpu": 1}),
    ],
)
def test_resources_are_read(text, offers):
    assert parse_resources(text) == offers


@pytest.mark.parametrize("text", ["", "=1", "H200=", "H200=x", "H200=-1", "a b=1", "H200=1,,"])
def test_what_is_no_resource_is_refused(text):
    if text == "H200=":
        assert parse_resources(text) == {"H200": 1}
        return
    with pytest.raises(InvalidInput, match="H200=1,cuda=1"):
        parse_resources(text)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("Something Else X1", "X1"),
        ("", "cuda"),
    ],
)
def test_gpus_have_the_catalogues_names(name, kind):
    assert device_kind_of(name) == kind


def test_a_machine_offers_what_it_has(monkeypatch):
    assert detect_resources(["NVIDIA H200"]) == {"cpu": 1, "cuda": 1, "H200": 1}
    assert detect_resources([]) == {"cpu": 1}
    monkeypatch.setattr(offers_module, "find_spec", lambda name: None)
    assert detect_resources([]) == {}


@pytest.mark.parametrize(
    ("device", "kind", "cluster", "needs"),
    [
        (None, None, None, "cpu"),
        ("cpu", "cpu", None, "cpu"),
        ("cuda", None, None, "cuda"),
        ("cuda:0", "h200", None, "H200"),
        ("cuda", None, "8xH200", "H200"),
        ("cuda", None, "2x24GB", "cuda"),
        ("cuda", None, "2xH200,2xH100", "cuda"),
        ("cuda", "MyOwn", None, "MyOwn"),
        (None, None, "8xH200", "cpu"),
    ],
)
def test_what_a_measurement_needs(device, kind, cluster, needs):
    request = MeasureRequest.model_validate({**REQUEST, "profiling": {"device": device}})
    found = required_resource(request, kind, None if cluster is None else Cluster.parse(cluster))
    assert found == needs


@pytest.mark.parametrize(
    ("prefer", "seconds", "applied"),
    [
        (None, 60.0, None),
        (["wait=5"], 5.0, "wait=5"),
        (['respond-async, wait="7"'], 7.0, "wait=7"),
        (["handling=strict", "WAIT = 3"], 3.0, "wait=3"),
        (["respond-async"], 0.0, "respond-async"),
        (["wait=99999"], 300.0 + SLACK_S, f"wait={300 + SLACK_S:g}"),
        (["wait=-1"], 60.0, None),
        (["wait=1.5"], 60.0, None),
        (["wait=x,,;"], 60.0, None),
    ],
)
def test_preferences(prefer, seconds, applied):
    assert wait_of(prefer, 300.0) == (seconds, applied)


def test_what_the_page_about_jobs_shows_can_be_asked(repository):
    page = (repository / "docs" / "service" / "jobs.md").read_text()
    (body,) = re.findall(r"-d '(\{.*?\})' \$URL/v1/profile-jobs", page, re.DOTALL)
    assert ProfileJobRequest.model_validate_json(body).model is not None
    assert set(re.findall(r"`(STAGEWRIGHT_\w+)`", page)) <= {
        "STAGEWRIGHT_" + name.upper() for name in ServerSettings.model_fields
    }


def test_a_fleets_worker_measures_by_its_own_variables(monkeypatch):
    monkeypatch.setenv("STAGEWRIGHT_CHILD_MEMORY_BYTES", str(2**30))
    assert read_own_setup().memory_bytes == 2**30
    monkeypatch.setenv("STAGEWRIGHT_CHILD_MEMORY_BYTES", "much")
    with pytest.raises(InvalidInput, match="CHILD_MEMORY_BYTES"):
        run_worker("tcp://127.0.0.1:1", offers={"cpu": 1})


def test_a_worker_without_anything_to_offer_says_so(monkeypatch):
    with pytest.raises(InvalidInput, match="--resources H200=1"):
        run_worker("tcp://127.0.0.1:1", offers={})
