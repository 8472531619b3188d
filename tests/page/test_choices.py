"""What sliders of a plan's page offer is what the service prices, and nothing else."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from stagewright.api.app import create_app
from stagewright.api.page.slider_choices import choices_of
from stagewright.api.planning.what_if import PricedSplit, price
from stagewright.api.settings.settings import ServerSettings
from stagewright.api.store.database import IN_MEMORY
from stagewright.core.errors import InvalidInput
from stagewright.core.service.documents import StoredPlan
from tests.page.blocks import blocks

TOKEN = "a-token-for-choices"
SOME, EACH = (1, 2, 7), range(1, 14)
"""Numbers of micro-batches."""


@pytest.fixture(scope="module")
def client():
    app = create_app(ServerSettings(token=TOKEN, database=IN_MEMORY))
    with TestClient(app, base_url="http://localhost") as client:
        client.headers["Authorization"] = f"Bearer {TOKEN}"
        yield client


def planned(client, num_layers, cluster, **options):
    body = {
        "profile": blocks(num_layers).model_dump(mode="json"),
        "cluster": cluster,
        "options": options,
    }
    return StoredPlan.model_validate(client.post("/v1/plans", json=body).json())


@pytest.mark.parametrize(
    ("num_layers", "cluster", "options"),
    [
        (12, "4x24GB", {"num_stages": 4}),
        (12, "3x24GB", {"num_stages": 3, "max_extra_in_flight": 1}),
        (12, "4x24GB", {"num_stages": 8, "schedule": "interleaved_1f1b", "num_microbatches": 6}),
        (12, "2x24GB", {"num_stages": 6, "schedule": "looped_bfs", "chunks": 3}),
        (6, "2x2x24GB", {"num_stages": 2, "max_replicas": 2}),
    ],
)
def test_what_is_offered_is_what_is_priced(client, num_layers, cluster, options):
    stored, profile = planned(client, num_layers, cluster, **options), blocks(num_layers)
    choices = choices_of(stored.plan, profile, stored.cluster)
    replicas = tuple(stage.replicas for stage in stored.plan.stages)
    for name, choice in choices.items():
        wrong = []
        for count in SOME if choice.counts is None else EACH:
            changed = {
                "schedule": name,
                "num_microbatches": count,
                "chunks": choice.chunks,
                "max_extra_in_flight": choice.max_extra_in_flight,
            }
            asked = stored.options.model_copy(update=changed)
            rest = stored.plan.balance, replicas
            split = PricedSplit(stored.plan, profile, stored.cluster, asked, *rest)
            is_offered = not choice.refusal and count in (
                choice.counts or range(choice.least, choice.most + 1)
            )
            if is_offered != is_priced(split):
                wrong.append(count)
        assert (name, wrong) == (name, [])
    assert choices[stored.options.schedule].most >= 64


def is_priced(split):
    try:
        return price(split, False).status == "simulated"
    except InvalidInput:
        return False


def test_no_more_is_offered_than_the_server_simulates(client, monkeypatch):
    stored = planned(client, 12, "4x24GB", num_stages=4)
    monkeypatch.setattr("stagewright.api.planning.requests.MAX_SIMULATION", 4 * 40)
    monkeypatch.setattr("stagewright.api.planning.requests.MAX_SIMULATION_PLAIN", 4 * 40)
    choice = choices_of(stored.plan, blocks(12), stored.cluster)["1f1b"]
    body = {"plan_id": stored.id}
    found = [
        client.post("/v1/views", json={**body, "options": {"num_stages": 4, "num_microbatches": m}})
        for m in (choice.most, choice.most + 1)
    ]
    assert [answer.json()["status"] for answer in found] == ["simulated", "refused"]
    assert f"at most {choice.most} micro-batches" in found[1].json()["refused"]


def test_what_cannot_be_priced_is_an_answer_that_says_why(client):
    stored = planned(client, 12, "4x24GB", num_stages=4)
    bodies = [{"balance": [1, 2]}, {"options": {"schedule": "zbv", "chunks": 5}}]
    for body in bodies:
        answer = client.post("/v1/views", json={"plan_id": stored.id, **body})
        assert answer.status_code == 200
        found = answer.json()
        assert (found["status"], found["view"]) == ("refused", None)
        assert found["refused"]
        same = client.post("/v1/simulations", json={"plan_id": stored.id, **body})
        assert same.status_code == 422
        assert found["refused"] == same.json()["detail"]
    assert client.post("/v1/views", json={"plan_id": "plan_missing"}).status_code == 404
    assert client.post("/v1/views", json={"plan_id": stored.id, "balance": "3"}).status_code == 422
