"""Planning over HTTP, with the real planner."""

from __future__ import annotations

import asyncio
import json
import math
import threading

import pytest

from stagewright.api.http.examples import measure_example
from stagewright.api.planning import decision
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import DeadlineExceeded, Infeasible
from stagewright.core.plan.plan import Plan, PlanOptions
from stagewright.core.profile.profile import Profile
from stagewright.planner.assemble import CUT_SHORT
from stagewright.planner.plan import plan as make_plan


@pytest.fixture
def measuring_client(make_client, child, profile):
    """A client whose service takes every model for the example profile."""
    program = f"import sys; sys.stdin.read(); sys.stdout.write({json.dumps(profile)!r})"
    return make_client(measure_command=child(program))


def test_a_profile_is_planned_as_the_library_plans_it(client, profile):
    response = client.post("/v1/plans", json={"profile": profile, "cluster": "2x24GB"})
    assert response.status_code == 201
    body = response.json()
    assert body["status"] == "planned"
    assert body["id"].startswith("plan_")
    assert body["infeasible"] is None
    expected = make_plan(Profile.model_validate(profile), Cluster.parse("2x24GB"))
    assert Plan.model_validate(body["plan"]) == expected
    assert body["profile_id"] == Profile.model_validate(profile).content_id()


def test_the_location_leads_to_the_same_answer(client, profile):
    created = client.post("/v1/plans", json={"profile": profile, "cluster": "2xcpu"})
    found = client.get(created.headers["Location"])
    assert found.status_code == 200
    assert found.json() == created.json()
    assert found.json()["cluster"] == Cluster.parse("2xcpu").model_dump(mode="json")
    assert found.json()["options"]["num_microbatches"] == 8


def test_options_reach_the_planner(client, profile):
    options = {"num_stages": 1, "num_microbatches": 3, "schedule": "gpipe"}
    request = {"profile": profile, "cluster": "2xcpu", "options": options}
    plan = client.post("/v1/plans", json=request).json()["plan"]
    assert (len(plan["stages"]), plan["num_microbatches"], plan["schedule"]) == (1, 3, "gpipe")


@pytest.mark.parametrize(
    "options",
    [
        {"objective": "throughput", "max_replicas": None},
        {"objective": "memory", "recompute": "auto"},
        {"max_stages": 1, "gap": 0.01, "memory_fraction": 0.5},
        {"schedule": "zero_bubble"},
        {"schedule": "gpipe", "num_stages": 2},
        {"batch_size": 512},
        {"together": [["blocks.0", "blocks.1"]], "no_cut_after": ["blocks.2"]},
        {"pins": [{"layer": "blocks.3", "stage": 1}, {"layer": "blocks.0", "kind": "80GB"}]},
        {"tied": "together", "layer_order": "any", "max_extra_in_flight": 1},
    ],
)
def test_every_option_gives_the_librarys_plan(client, profile, options):
    profile["inputs"] = [{"name": "x", "shape": [256, 1024], "dtype": "float32"}]
    request = {"profile": profile, "cluster": "1x80GB,1x24GB", "options": options}
    response = client.post("/v1/plans", json=request)
    assert response.status_code == 201, response.text
    expected = make_plan(
        Profile.model_validate(profile),
        Cluster.parse("1x80GB,1x24GB"),
        PlanOptions.model_validate_json(json.dumps(options)),
    )
    assert Plan.model_validate(response.json()["plan"]) == expected


@pytest.mark.parametrize(
    ("options", "pointer"),
    [
        ({"objective": "fun"}, "/options/objective"),
        ({"max_replicas": 0}, "/options/max_replicas"),
        ({"pins": [{"layer": "blocks.0"}]}, "/options/pins/0"),
        ({"no_cut_after": ["blocks.9"]}, "/options/no_cut_after"),
    ],
)
def test_an_option_that_makes_no_sense_is_named(client, profile, options, pointer):
    request = {"profile": profile, "cluster": "2xcpu", "options": options}
    response = client.post("/v1/plans", json=request)
    assert response.status_code == 422
    assert pointer in [error["pointer"] for error in response.json()["errors"]]


def test_shorthand_takes_nodes_and_kinds_and_so_many_devices(client, profile):
    for text in ("2x2x24GB", "1x24GB,1x80GB"):
        answer = client.post("/v1/plans", json={"profile": profile, "cluster": text}).json()
        assert answer["cluster"] == Cluster.parse(text).model_dump(mode="json")
    few = {"profile": profile, "options": {"num_microbatches": 1}}
    assert client.post("/v1/plans", json={**few, "cluster": "16384xcpu"}).status_code == 201
    response = client.post("/v1/plans", json={**few, "cluster": "16384xcpu,1xcpu"})
    assert response.status_code == 422
    assert "shorthand is limited to 16384" in response.json()["detail"]


@pytest.mark.in_threads
def test_the_deadline_is_the_servers_or_a_shorter_one(make_client, profile, monkeypatch):
    given = []

    def note(*arguments, deadline_s, progress):
        given.append(deadline_s)
        return make_plan(*arguments)

    monkeypatch.setattr("stagewright.api.planning.decision.plan", note)
    client = make_client(plan_deadline_s=7.0)
    request = {"profile": profile, "cluster": "2xcpu"}
    assert client.post("/v1/plans", json=request).status_code == 201
    assert client.post("/v1/plans", json={**request, "deadline_s": 2.5}).status_code == 201
    assert given == [pytest.approx(7.0, abs=0.5), pytest.approx(2.5, abs=0.5)]
    response = client.post("/v1/plans", json={**request, "deadline_s": 7.5})
    assert response.status_code == 422
    assert response.json()["errors"][0]["pointer"] == "/deadline_s"
    assert "at most 7 s, not 7.5 s" in response.json()["detail"]
    for wrong in (0, -1, "soon"):
        assert client.post("/v1/plans", json={**request, "deadline_s": wrong}).status_code == 422


@pytest.mark.in_threads
def test_no_plan_in_time_is_a_problem_of_its_own(client, profile, monkeypatch):
    def late(*_, **__):
        raise DeadlineExceeded("no plan was found before the deadline")

    monkeypatch.setattr("stagewright.api.planning.decision.plan", late)
    response = client.post("/v1/plans", json={"profile": profile, "cluster": "2xcpu"})
    assert response.status_code == 504
    assert response.json()["type"].endswith(":deadline-exceeded")
    assert client.get("/v1/plans").json()["plans"] == []


def test_asking_twice_is_one_plan(client, profile):
    request = {"profile": profile, "cluster": "2xcpu"}
    first, second = (client.post("/v1/plans", json=request) for _ in range(2))
    assert first.json() == second.json()
    assert len(client.get("/v1/plans").json()["plans"]) == 1


def test_that_nothing_fits_is_an_answer_and_is_kept(client, profile):
    created = client.post("/v1/plans", json={"profile": profile, "cluster": "2x0.001GB"})
    assert created.status_code == 201
    body = created.json()
    assert (body["status"], body["plan"]) == ("infeasible", None)
    answer = body["infeasible"]
    assert answer["constraint"]
    assert answer["required"] > answer["available"]
    assert answer["message"]
    assert client.get(created.headers["Location"]).json() == body
    (row,) = client.get("/v1/plans").json()["plans"]
    assert (row["id"], row["status"], row["step_time_s"]) == (body["id"], "infeasible", None)


def test_ways_out_can_be_asked_for_as_they_are(client, profile):
    """Too few stages, whatever the memory."""
    request = {"profile": profile, "cluster": "2xcpu", "options": {"num_stages": 3}}
    answer = client.post("/v1/plans", json=request).json()["infeasible"]
    assert {way_out["num_devices"] for way_out in answer["ways_out"]} == {2, 3}
    for way_out in answer["ways_out"]:
        again = {
            "profile": profile,
            "cluster": f"{way_out['num_devices']}xcpu",
            "options": way_out["options"],
        }
        plan = client.post("/v1/plans", json=again).json()["plan"]
        assert plan["step_time_s"] == pytest.approx(way_out["step_time_s"], rel=0.05)


@pytest.mark.in_threads
def test_an_infinite_need_is_written_as_none(client, profile, monkeypatch):
    """JSON has no infinity."""

    def refuse(*_, **__):
        raise Infeasible("no limit helps", constraint="memory", required=math.inf, available=1.0)

    monkeypatch.setattr("stagewright.api.planning.decision.plan", refuse)
    answer = client.post("/v1/plans", json={"profile": profile, "cluster": "2xcpu"}).json()
    assert answer["infeasible"]["required"] is None
    assert answer["infeasible"]["available"] == 1.0


def test_a_profile_may_be_stored_first_and_named(client, profile):
    stored = client.post("/v1/profiles", json=profile)
    assert stored.status_code == 201
    assert client.get(stored.headers["Location"]).json()["profile"]["model"] == "Example"
    request = {"profile_id": stored.json()["id"], "cluster": "2xcpu"}
    by_id = client.post("/v1/plans", json=request).json()
    inline = client.post("/v1/plans", json={"profile": profile, "cluster": "2xcpu"}).json()
    assert by_id == inline


def test_a_measured_profile_is_stored_too(measuring_client, profile):
    response = measuring_client.post("/v1/plans", json=measure_example())
    assert response.status_code == 201
    found = measuring_client.get(f"/v1/profiles/{response.json()['profile_id']}").json()
    assert Profile.model_validate(found["profile"]) == Profile.model_validate(profile)


def test_an_inline_profile_is_stored_too(client, profile):
    created = client.post("/v1/plans", json={"profile": profile, "cluster": "2xcpu"}).json()
    assert client.get(f"/v1/profiles/{created['profile_id']}").status_code == 200


def test_plans_are_listed_newest_first(client, profile):
    ids = [
        client.post("/v1/plans", json={"profile": profile, "cluster": devices}).json()["id"]
        for devices in ("1xcpu", "2xcpu", "3xcpu")
    ]
    listed = client.get("/v1/plans", params={"limit": 2}).json()["plans"]
    assert [row["id"] for row in listed] == ids[:0:-1]
    assert {"created_at", "model", "num_stages", "profile_id", "step_time_s"} <= listed[0].keys()


def test_health_says_the_version(make_client):
    from stagewright import __version__

    response = make_client(authorized=False).get("/healthz")
    assert response.json() == {"status": "ok", "version": __version__}


@pytest.mark.in_threads
def test_the_loop_answers_while_a_plan_is_made(client, profile, monkeypatch):
    """Planning happens in a thread that is not the event loop's."""
    where = []

    def slow(*arguments, **options):
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        where.append(client.get("/healthz").status_code)
        return make_plan(*arguments, **options)

    monkeypatch.setattr("stagewright.api.planning.decision.plan", slow)
    thread = threading.Thread(
        target=client.post,
        args=("/v1/plans",),
        kwargs={"json": {"profile": profile, "cluster": "2xcpu"}},
        daemon=True,
    )
    thread.start()
    thread.join(timeout=20)
    assert where == [200]


def at_size(profile, size):
    """The profile as if measured with that many samples."""
    tensor = {"name": "x", "shape": [size, 1024], "dtype": "float32"}
    return {**profile, "inputs": [tensor]}


def test_profiles_of_several_sizes_are_planned_together(client, profile):
    several = [at_size(profile, 1), at_size(profile, 4)]
    request = {"profiles": several, "cluster": "2x80GB", "options": {"batch_size": 16}}
    response = client.post("/v1/plans", json=request)
    assert response.status_code == 201, response.text
    read = [Profile.model_validate(entry) for entry in several]
    expected = make_plan(read, "2x80GB", PlanOptions(batch_size=16))
    body = response.json()
    assert Plan.model_validate(body["plan"]) == expected
    assert body["profile_id"] == expected.profile_id == read[1].content_id()
    for entry in read:
        assert client.get(f"/v1/profiles/{entry.content_id()}").status_code == 200


def test_numbers_of_samples_and_microbatches_have_to_agree(client, profile):
    """Cause: the number of micro-batches was dropped without a word."""
    options = {"batch_size": 16, "num_microbatches": 3}
    request = {"profile": at_size(profile, 2), "cluster": "2x80GB", "options": options}
    response = client.post("/v1/plans", json=request)
    assert response.status_code == 422
    assert response.json()["errors"][0]["pointer"] == "/options/num_microbatches"
    options["num_microbatches"] = 4
    plan = client.post("/v1/plans", json=request).json()["plan"]
    assert (plan["num_microbatches"], plan["inputs"][0]["shape"][0]) == (4, 4)


def test_a_way_out_can_be_asked_for_as_it_stands(client, profile):
    """A batch_size comes with the number of micro-batches that was found to fit."""
    big = at_size(profile, 8)
    request = {"profile": big, "cluster": "1x36MB", "options": {"optimizer": "none"}}
    body = client.post("/v1/plans", json=request).json()
    assert body["status"] == "infeasible"
    ways_out = [way for way in body["infeasible"]["ways_out"] if way["num_devices"] == 1]
    assert any(way["options"]["batch_size"] for way in ways_out)
    for way_out in ways_out:
        again = client.post("/v1/plans", json={**request, "options": way_out["options"]})
        assert again.json()["status"] == "planned", way_out


@pytest.mark.in_threads
def test_a_plan_cut_short_by_its_deadline_is_searched_for_again(client, profile, monkeypatch):
    """Cause: the first plan on a busy machine was answered for good, a better one never found."""
    request = {"profile": profile, "cluster": "2x80GB"}
    found = []

    def hurried(*args, **kwargs):
        found.append(make_plan(*args, **kwargs))
        if len(found) > 1:
            return found[-1]
        return found[-1].model_copy(update={"notes": (*found[-1].notes, CUT_SHORT)})

    monkeypatch.setattr(decision, "plan", hurried)
    first = client.post("/v1/plans", json=request)
    assert first.json()["plan"]["notes"][-1] == CUT_SHORT
    second = client.post("/v1/plans", json=request)
    assert CUT_SHORT not in second.json()["plan"]["notes"]
    assert second.json()["id"] != first.json()["id"]
    third = client.post("/v1/plans", json=request)
    assert (third.headers["Stagewright-Reused"], third.json()) == ("plan", second.json())
    assert len(found) == 2
