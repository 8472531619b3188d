"""What-if questions: priced as the library prices them, and nothing is stored."""

from __future__ import annotations

import pytest

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.core.profile.profile import Profile
from stagewright.planner.price_split import plan_from_balance
from tests.builders import random_profile
from tests.planner.branching import two_towers


@pytest.fixture
def planned(client, profile):
    return client.post("/v1/plans", json={"profile": profile, "cluster": "2x24GB"}).json()


def stored(client):
    return [client.get(f"/v1/{kind}").json()[kind] for kind in ("plans", "profiles", "graphs")]


def test_a_split_of_ones_own_is_priced_and_not_kept(client, profile):
    request = {"profile": profile, "balance": [1, 3], "cluster": "2x24GB", "timeline": True}
    response = client.post("/v1/simulations", json=request)
    assert response.status_code == 200, response.text
    expected = plan_from_balance(
        Profile.model_validate(profile), Cluster.parse("2x24GB"), PlanOptions(), [1, 3]
    )
    body = response.json()
    assert Plan.model_validate(body["plan"]) == expected
    assert body["timeline"]["step_time_s"] == pytest.approx(expected.step_time_s)
    assert stored(client) == [[], [], []]


def test_a_stored_plan_is_priced_again_with_what_is_changed(client, planned):
    same = client.post("/v1/simulations", json={"plan_id": planned["id"]}).json()
    assert same["plan"]["step_time_s"] == planned["plan"]["step_time_s"]
    assert same["plan"]["balance"] == planned["plan"]["balance"]
    assert same["timeline"] is None
    more = {"plan_id": planned["id"], "options": {"num_microbatches": 32}}
    longer = client.post("/v1/simulations", json=more).json()
    assert longer["plan"]["step_time_s"] > planned["plan"]["step_time_s"]
    cut = client.post("/v1/simulations", json={"plan_id": planned["id"], "balance": [1, 3]}).json()
    assert cut["plan"]["balance"] == [1, 3]
    assert len(client.get("/v1/plans").json()["plans"]) == 1


@pytest.mark.parametrize("options", [{"batch_size": 32}, {"layer_order": "any"}, {}])
def test_a_stored_plan_is_priced_as_it_was_planned(client, options):
    """Cause: plans that chose their micro-batches or reordered layers were priced as if not."""
    profile = two_towers(5) if options.get("layer_order") else random_profile(3, 12)
    body = {"profile": profile.model_dump(mode="json"), "cluster": "2x24GB", "options": options}
    planned = client.post("/v1/plans", json=body).json()
    assert bool(planned["plan"]["layer_order"]) == bool(options.get("layer_order"))
    same = client.post("/v1/simulations", json={"plan_id": planned["id"]}).json()["plan"]
    for name in ("step_time_s", "balance", "profile_id", "options", "layer_order", "stages"):
        assert same[name] == planned["plan"][name], name


def test_that_a_split_does_not_fit_is_an_answer(client, planned):
    request = {"plan_id": planned["id"], "cluster": "2x0.001GB"}
    body = client.post("/v1/simulations", json=request).json()
    assert (body["status"], body["plan"]) == ("infeasible", None)
    assert body["infeasible"]["required"] > body["infeasible"]["available"]


@pytest.mark.parametrize(
    ("change", "pointer", "words"),
    [
        ({"plan_id": "plan_1", "profile": None}, "/plan_id", "no plan"),
        ({"plan_id": "plan_1"}, "/profile", "exactly one of"),
        ({"profile_id": "profile_1", "profile": None}, "/profile_id", "no profile"),
        ({"balance": None}, "/balance", "give a 'balance'"),
        ({"cluster": None}, "/cluster", "give a 'cluster'"),
        ({"balance": None, "replicas": [1]}, "/balance", "balance"),
        ({"balance": [0, 4]}, "/balance/0", "greater"),
        ({"replicas": [1]}, "/replicas", "1 numbers of replicas for 2 stages"),
        ({"options": {"num_microbatches": 2**20}}, "/options/num_microbatches", "limit"),
    ],
)
def test_the_field_at_fault_is_named(client, profile, change, pointer, words, monkeypatch):
    monkeypatch.setattr("stagewright.api.planning.requests.MAX_SIMULATION", 2**19)
    request = {"profile": profile, "balance": [2, 2], "cluster": "2xcpu", **change}
    response = client.post("/v1/simulations", json=request)
    assert response.status_code == 422, response.text
    (error,) = response.json()["errors"]
    assert error["pointer"] == pointer
    assert words in error["detail"]


def test_a_plan_is_shown_as_schedule_timeline_and_files(client, planned):
    base = f"/v1/plans/{planned['id']}"
    schedule = client.get(f"{base}?format=schedule").json()
    assert schedule["num_microbatches"] == planned["plan"]["num_microbatches"]
    timeline = client.get(f"{base}?format=timeline").json()
    assert timeline["step_time_s"] == pytest.approx(planned["plan"]["step_time_s"])
    assert client.get(f"{base}?format=plan").json() == planned["plan"]
    drawing = client.get(f"{base}?format=svg")
    assert drawing.headers["Content-Type"].startswith("image/svg+xml")
    assert drawing.text.startswith("<svg")
    assert client.get(f"{base}?format=chrome_trace").json()["traceEvents"]
    assert client.get(f"{base}?format=pickle").status_code == 422
    balance = client.get(f"{base}?format=balance")
    assert balance.headers["Content-Type"].startswith("text/plain")
    assert balance.text == f"{planned['plan']['balance']}\n"
    rows = client.get(f"/v1/profiles/{planned['profile_id']}?format=csv").text
    assert len(rows.strip().splitlines()) == 5


TEXT = {"Accept": "text/plain", "Idempotency-Key": "text"}


def test_a_client_that_wants_text_gets_the_balance_alone(client, profile):
    body = {"profile": profile, "cluster": "2xcpu"}
    planned = client.post("/v1/plans", json=body).json()
    for replayed in (None, "true"):
        answer = client.post("/v1/plans", json=body, headers=TEXT)
        assert answer.status_code == 201
        assert answer.headers["Content-Type"].startswith("text/plain")
        assert answer.text == f"{planned['plan']['balance']}\n"
        assert answer.headers["Location"] == f"/v1/plans/{planned['id']}"
        assert answer.headers.get("Idempotency-Replayed") == replayed
    both = client.post("/v1/plans", json=body, headers={"Accept": "application/json, text/plain"})
    assert both.json()["id"] == planned["id"]


def test_where_nothing_fits_text_is_refused_with_the_reason(client, profile):
    body = {"profile": profile, "cluster": "2x0.001GB"}
    answer = client.post("/v1/plans", json=body, headers={"Accept": "text/plain"})
    assert answer.status_code == 409
    assert answer.json()["type"].endswith(":no-plan")
    assert "needs" in answer.json()["detail"]


def test_an_infeasible_request_has_no_schedule_and_says_so(client, profile):
    record = client.post("/v1/plans", json={"profile": profile, "cluster": "2x0.001GB"}).json()
    response = client.get(f"/v1/plans/{record['id']}?format=schedule")
    assert response.status_code == 409
    assert response.json()["type"].endswith(":no-plan")
