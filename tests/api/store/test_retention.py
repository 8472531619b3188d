"""What gets old goes, and nothing else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from stagewright.api.store import maintenance as retention_module
from stagewright.api.store.errors import RecordNotFound
from stagewright.api.store.records import DEFAULT_PROJECT as HERE
from stagewright.api.store.records import Answer, AuditEvent, JobRequest, Retention
from stagewright.core.profile.profile import Profile
from tests.api.stored import a_graph, infeasible

NOTHING = Retention(jobs_days=None, audit_days=None, plans_days=None)
REQUEST = JobRequest(kind="plan", request_json="{}")


def keep(**days: float) -> Retention:
    return NOTHING.model_copy(update=days)


@pytest.fixture
def a_profile(profile: dict[str, Any]) -> Profile:
    return Profile.model_validate(profile)


def test_finished_jobs_go_with_their_events_and_others_stay(store, clock, monkeypatch):
    monkeypatch.setattr(retention_module, "BATCH_ROWS", 2)
    old = [store.jobs.submit(HERE, REQUEST).id for _ in range(5)]
    for job_id in old:
        store.jobs.request_cancel(HERE, job_id)
    running = store.jobs.submit(HERE, REQUEST).id
    store.jobs.start(running, attempt=0, worker="w")
    queued = store.jobs.submit(HERE, REQUEST).id
    clock.time += timedelta(days=2)
    fresh = store.jobs.submit(HERE, REQUEST).id
    store.jobs.request_cancel(HERE, fresh)
    assert store.expire(keep(jobs_days=1))["jobs"] == 5
    left = [job.id for job in store.jobs.list(HERE, limit=99).items]
    assert left == [fresh, queued, running]
    with pytest.raises(RecordNotFound):
        store.jobs.events(HERE, old[0])
    assert len(store.jobs.events(HERE, running)) == 2
    assert store.expire(keep(jobs_days=1))["jobs"] == 0


def test_plans_go_first_and_profiles_that_nothing_names(store, clock, a_profile):
    other = a_profile.model_copy(update={"model": "Other"})
    kept_id = store.documents.put(HERE, a_profile).id
    store.documents.put(HERE, other)
    store.documents.put(HERE, a_graph())
    old = store.documents.put_plan(HERE, infeasible(kept_id, 2.0)).id
    store.reuse.remember(HERE, "plan", "d", old)
    clock.time += timedelta(days=10)
    fresh = store.documents.put_plan(HERE, infeasible(kept_id, 3.0)).id
    removed = store.expire(keep(plans_days=5))
    assert {name: number for name, number in removed.items() if number} == {
        "plans": 1, "profiles": 1, "graphs": 1, "reusable_results": 1,
    }  # fmt: skip
    assert [row.id for row in store.documents.plans(HERE, limit=9).items] == [fresh]
    assert [row.id for row in store.documents.profiles(HERE, limit=9).items] == [kept_id]
    assert store.reuse.recall(HERE, "plan", "d") is None


def test_a_profile_of_two_projects_goes_where_nothing_names_it(store, clock, a_profile):
    other = store.projects.create("other").id
    for project in (HERE, other):
        store.documents.put(project, a_profile)
    clock.time += timedelta(days=10)
    store.documents.put_plan(HERE, infeasible(a_profile.content_id()))
    store.expire(keep(plans_days=5))
    assert len(store.documents.profiles(HERE, limit=9).items) == 1
    assert store.documents.profiles(other, limit=9).items == ()


def test_lines_of_the_audit_log_and_answers_go_by_their_own_age(store, clock):
    store.audit.add(AuditEvent(action="old", outcome="ok"))
    store.idempotency.claim(HERE, "old", "d", holder="us")
    store.idempotency.complete(HERE, "old", Answer(status=201), holder="us")
    clock.time += timedelta(hours=30)
    store.audit.add(AuditEvent(action="new", outcome="ok"))
    store.idempotency.claim(HERE, "new", "d", holder="us")
    assert store.expire(keep(audit_days=1)) == {"idempotent_answers": 1, "audit_log": 1}
    assert [line.action for line in store.audit.entries(limit=9).items] == ["new"]


def test_asked_for_nothing_it_keeps_everything(store, clock, a_profile):
    profile_id = store.documents.put(HERE, a_profile).id
    store.documents.put_plan(HERE, infeasible(profile_id))
    store.jobs.request_cancel(HERE, store.jobs.submit(HERE, REQUEST).id)
    store.audit.add(AuditEvent(action="a", outcome="ok"))
    clock.time += timedelta(days=9999)
    assert store.expire(NOTHING) == {"idempotent_answers": 0}


def test_a_plan_stored_while_profiles_go_has_its_profile(store, clock, a_profile):
    """Either it was there first and keeps the profile, or it is told that there is none."""
    profiles = [a_profile.model_copy(update={"model": f"M{index}"}) for index in range(12)]
    for profile in profiles:
        store.documents.put(HERE, profile)
    clock.time += timedelta(days=10)

    def put(profile: Profile) -> bool:
        try:
            store.documents.put_plan(HERE, infeasible(profile.content_id()))
        except RecordNotFound:
            return False
        return True

    with ThreadPoolExecutor(3) as pool:
        expiring = pool.submit(store.expire, keep(plans_days=5))
        stored = list(pool.map(put, profiles))
    left = {row.id for row in store.documents.profiles(HERE, limit=99).items}
    assert left == {
        profile.content_id() for profile, kept in zip(profiles, stored, strict=True) if kept
    }
    assert expiring.result()["profiles"] == len(profiles) - len(left)


def test_keys_revoked_or_expired_are_forgotten_in_time_and_live_ones_are_not(store, clock):
    revoked = store.keys.create(HERE, name="revoked", scopes=["read"]).key.id
    store.keys.revoke(HERE, revoked)
    store.keys.create(HERE, name="old", scopes=[], expires_at=clock.time + timedelta(hours=1))
    live = store.keys.create(HERE, name="live", scopes=[]).key.id
    later = clock.time + timedelta(days=99)
    valid = store.keys.create(HERE, name="valid", scopes=[], expires_at=later).key.id
    assert store.expire(keep(keys_days=5))["api_keys"] == 0
    clock.time += timedelta(days=6)
    fresh = store.keys.create(HERE, name="fresh", scopes=[]).key.id
    store.keys.revoke(HERE, fresh)
    assert store.expire(keep(keys_days=5))["api_keys"] == 2
    assert [key.id for key in store.keys.list(HERE)] == [live, valid, fresh]
