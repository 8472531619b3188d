"""Models over HTTP by a published name, or by a Hugging Face ``config.json``."""

from __future__ import annotations

import json
import os
import threading
import time

import pytest

from stagewright.api.planning.solver_pool import Solver
from stagewright.api.sandbox.limits import descendants
from stagewright.api.settings.settings import ServerSettings
from stagewright.client.model_sources import describe_model
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.requests.requests import EstimateOptions, EstimateRequest
from stagewright.profiler.estimates.worker import estimate

CONFIG = {
    "model_type": "gpt2", "vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 2,
    "n_head": 2, "architectures": ["GPT2LMHeadModel"], "n_inner": None, "use_cache": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def estimated() -> str:
    """An estimate of a small model."""
    request = EstimateRequest(
        model={"family": "mlp"}, cluster=Cluster.parse("2xH100"), estimate=EstimateOptions()
    )
    return estimate(request).model_dump_json()


@pytest.fixture
def estimating(make_client, child, estimated):
    """A client whose service answers the estimate of a small model, whatever the model."""
    return make_client(
        estimate_command=child(f"import sys; sys.stdin.read(); sys.stdout.write({estimated!r})")
    )


@pytest.mark.parametrize("model", ["gpt2-xl", "GPT-3", CONFIG], ids=["name", "alias", "config"])
def test_shorthand_is_estimated_as_the_client_asks_for_it(estimating, model):
    short = estimating.post("/v1/plans", json={"model": model, "cluster": "2xH100"})
    assert short.status_code == 201, short.text
    said = describe_model(model)
    body = {**said, "estimate": {}, "cluster": "2xH100"}
    whole = estimating.post("/v1/plans", json=json.loads(json.dumps(body)))
    assert whole.headers["Stagewright-Reused"] == "plan", "one request in two forms"
    assert whole.json() == short.json()


def test_a_published_model_has_the_tokens_of_its_training(estimating):
    sample = describe_model("gpt3-175b")["sample"]
    assert sample["inputs"]["input_ids"]["shape"] == [1, 2048]


def test_a_real_estimate_is_killed_at_the_requests_own_deadline(make_client):
    """Loading torch alone takes the child longer than what is asked for."""
    client = make_client(sandbox="off")
    before, seen = set(descendants(os.getpid())), set()
    is_answered = threading.Event()

    def watch():
        while not is_answered.wait(0.05):
            seen.update(descendants(os.getpid()))

    watching = threading.Thread(target=watch)
    watching.start()
    began_s = time.monotonic()
    body = {"model": "gpt2-xl", "cluster": "2xH100", "deadline_s": 0.5}
    answer = client.post("/v1/plans", json=body)
    took_s = time.monotonic() - began_s
    is_answered.set()
    watching.join()
    assert answer.status_code == 422, answer.text
    assert "no estimate within 0.5 s" in answer.json()["detail"]
    assert took_s < 0.5 + 10.0
    assert seen - before, "a child was started"
    assert not set(descendants(os.getpid())) & (seen - before), "and is gone"


@pytest.mark.parametrize("asked", [{}, {"deadline_s": 15}], ids=["the server's", "its own"])
def test_an_estimate_counts_in_the_requests_own_deadline(
    make_client, child, estimated, monkeypatch, asked
):
    given = []

    async def search(self, work, deadline_s, **options):
        given.append(deadline_s)
        return work(deadline_s)

    monkeypatch.setattr(Solver, "search", search)
    program = f"import sys, time; sys.stdin.read(); time.sleep(1); sys.stdout.write({estimated!r})"
    answer = make_client(estimate_command=child(program)).post(
        "/v1/plans", json={"model": "gpt2-xl", "cluster": "2xH100", **asked}
    )
    assert answer.status_code == 201, answer.text
    (left_s,) = given
    assert left_s <= 14 if asked else left_s == ServerSettings().plan_deadline_s


@pytest.mark.parametrize(
    ("model", "pointer", "words"),
    [
        ("gpt2-x", "/model", "did you mean 'gpt2-xl'"),
        ("x" * 100_000, "/model", "unknown model"),
        ({**CONFIG, "n_inner": 17}, "/model/n_inner", "is 17; built is 64"),
        ({**CONFIG, "n_layer": 0}, "/model/n_layer", "is too small: at least 1"),
        ({"model_type": "mamba"}, "/model/model_type", "built are gpt2, bert"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/plans", "/v1/profile-jobs"])
def test_what_is_not_known_is_refused_with_what_is(client, path, model, pointer, words):
    body = {"model": model, **({"cluster": "2xH100"} if path == "/v1/plans" else {})}
    answer = client.post(path, json=body)
    assert answer.status_code == 422, answer.text
    error = answer.json()["errors"][0]
    assert error["pointer"] == pointer
    assert words in error["detail"]


def test_shorthand_is_measured_where_profiling_is_asked_for(client):
    body = {"model": CONFIG, "profiling": {"device": "cpu"}, "cluster": "2xcpu"}
    with_job = client.post("/v1/plans", json=body, headers={"Prefer": "respond-async"})
    assert with_job.status_code == 202, with_job.text
    job = client.post("/v1/profile-jobs", json={"model": CONFIG, "profiling": {"device": "cpu"}})
    assert job.status_code == 202, job.text
    for made in (with_job, job):
        client.post(f"/v1/jobs/{made.json()['id']}/cancel")


FAMILY = {"family": "mlp"}
SAMPLE = {"inputs": {"input": {"shape": [2, 64]}}}


@pytest.mark.parametrize(
    "further",
    [
        {},
        {"sample": SAMPLE},
        {"sample": None, "estimate": None, "profiling": None},
        {"estimate": {}},
        {"estimate": {"device": "H100"}, "sample": SAMPLE},
    ],
    ids=str,
)
@pytest.mark.parametrize("model", [FAMILY, {**FAMILY, "config": {}}, "gpt2", CONFIG], ids=str)
def test_a_model_in_any_spelling_is_a_complete_request(estimating, model, further):
    """A family without ``estimate`` was refused, and with a sample measured, unlike a name."""
    sample = {} if model in ("gpt2", CONFIG) else further
    body = {"model": model, "cluster": "2xH100", **{**further, **sample}}
    if model in ("gpt2", CONFIG):
        body.pop("sample", None)
    answer = estimating.post("/v1/plans", json=body)
    assert answer.status_code == 201, answer.text


def test_spellings_of_one_model_are_one_request(estimating):
    first = estimating.post("/v1/plans", json={"model": "gpt2", "cluster": "2xH100"})
    for body in (
        describe_model("gpt2"),
        {"model": describe_model("gpt2")["model"], "sample": describe_model("gpt2")["sample"]},
        {"model": "gpt2", "estimate": {}},
        {"model": "gpt2", "sample": None, "estimate": None},
    ):
        again = estimating.post("/v1/plans", json={**body, "cluster": "2xH100"})
        assert again.headers["Stagewright-Reused"] == "plan", body
        assert again.json()["id"] == first.json()["id"]


@pytest.mark.parametrize("model", [FAMILY, {**FAMILY, "config": {"num_layers": 2}}], ids=str)
def test_a_family_is_measured_with_its_usual_sample(client, model):
    body = {"model": model, "profiling": {"device": "cpu"}}
    plan = client.post(
        "/v1/plans", json={**body, "cluster": "2xcpu"}, headers={"Prefer": "respond-async"}
    )
    for made in (plan, client.post("/v1/profile-jobs", json=body)):
        assert made.status_code in (200, 202), made.text
        client.post(f"/v1/jobs/{made.json()['id']}/cancel")


@pytest.mark.parametrize("sample", [{}, [], 0, "", False])
def test_a_sample_that_is_none_is_not_replaced(client, sample):
    body = {"model": FAMILY, "sample": sample, "cluster": "2xH100"}
    answer = client.post("/v1/plans", json=body)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["pointer"].startswith("/sample")
