"""What pages draw of a plan is made where plans are searched for, once, and is the plan's own."""

from __future__ import annotations

import json

import pytest
from starlette.testclient import TestClient

from stagewright.api.app import create_app
from stagewright.api.http.examples import example_profile
from stagewright.api.page import plan_views as views
from stagewright.api.page.plan_views import drawing
from stagewright.api.planning.service import Planning
from stagewright.api.settings.settings import ServerSettings
from stagewright.api.store.database import IN_MEMORY
from stagewright.core.plan.plan import Plan
from stagewright.core.profile.profile import Profile
from stagewright.core.service.documents import StoredPlan
from stagewright.planner.simulator.plan_timeline import plan_rows, plan_timeline
from stagewright.view.build_plan_view import NOT_SEARCHED, build_plan_view

TOKEN = "a-token-for-drawings"


@pytest.fixture(scope="module")
def client():
    app = create_app(ServerSettings(token=TOKEN, database=IN_MEMORY))
    with TestClient(app, base_url="http://localhost") as client:
        client.headers["Authorization"] = f"Bearer {TOKEN}"
        yield client


@pytest.fixture
def stored(client):
    body = {"profile": example_profile(), "cluster": "2x24GB"}
    return StoredPlan.model_validate(client.post("/v1/plans", json=body).json())


@pytest.fixture
def drawn(monkeypatch):
    """The plans that were drawn, in whichever process."""
    run, found = Planning.run_in_solver, []

    async def note(self, principal, work, *args, **kwargs):
        if work is drawing:
            found.append(args)
        return await run(self, principal, work, *args, **kwargs)

    monkeypatch.setattr(Planning, "run_in_solver", note)
    return found


def test_a_plan_is_drawn_once_whoever_asks(client, stored, drawn):
    path = f"/v1/plans/{stored.id}/view"
    first = client.get(path)
    page = client.get(f"/plans/{stored.id}", headers={"Accept": "text/html"}).text
    assert client.get(path).text == first.text
    assert first.text in page
    assert len(drawn) == 1
    profile = Profile.model_validate(
        client.get(f"/v1/profiles/{stored.profile_id}").json()["profile"]
    )
    expected = build_plan_view(stored.plan, profile, stored.cluster)
    assert first.json() == json.loads(expected.model_dump_json())


def test_only_so_many_drawings_are_kept(client, stored, drawn, monkeypatch):
    monkeypatch.setattr(views, "MAX_KEPT_CHARACTERS", 1)
    for cluster in ("3x24GB", "3x24GB"):
        made = client.post("/v1/plans", json={"profile": example_profile(), "cluster": cluster})
        assert client.get(f"/v1/plans/{made.json()['id']}/view").status_code == 200
    assert len(drawn) == 2


def test_a_change_is_answered_without_what_it_does_not_need(client, stored):
    body = {"plan_id": stored.id, "options": {"num_microbatches": 9}}
    whole = client.post("/v1/views", json=body).json()["view"]
    brief = client.post("/v1/views", json={**body, "step": False, "layers": False}).json()["view"]
    assert whole["boxes"]
    assert whole["layers"]["names"]
    assert (brief["boxes"], brief["layers"]["names"], brief["graph"]["names"]) == (None, [], [])
    assert whole["header"]["proof"] == [NOT_SEARCHED]
    for same in ("header", "stages", "balance", "reproduce", "baselines"):
        assert brief[same] == whole[same]


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_rows_are_the_timelines(stored, recompute):
    stages = tuple(
        stage.model_copy(update={"recompute": recompute}) for stage in stored.plan.stages
    )
    plan: Plan = stored.plan.model_copy(update={"stages": stages})
    timeline, rows = plan_timeline(plan), plan_rows(plan)
    events = [tuple(event.model_dump(mode="json").values()) for event in timeline.events]
    assert [tuple(row) for row in rows.events] == events
    assert [tuple(row) for row in rows.held] == [
        tuple(change.model_dump().values()) for change in timeline.memory
    ]
