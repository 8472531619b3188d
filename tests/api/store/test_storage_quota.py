"""The size of a project's documents is counted, limited, and freed again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta

import pytest
from sqlalchemy import func, select

from stagewright.api.store.errors import StorageFull
from stagewright.api.store.records import DEFAULT_PROJECT as HERE
from stagewright.api.store.records import Answer, Retention
from stagewright.api.store.store import Store
from stagewright.api.store.tables import ANSWERS, GRAPHS, PLANS, PROFILES, PROJECTS
from stagewright.core.profile.profile import Profile
from tests.api.stored import a_graph, infeasible


@pytest.fixture
def a_profile(profile) -> Profile:
    return Profile.model_validate(profile)


def counted(store, project=HERE) -> int:
    with store._database.read() as connection:
        wanted = select(PROJECTS.c.stored_size).where(PROJECTS.c.id == project)
        return connection.execute(wanted).scalar_one()


def summed(store, project=HERE) -> int:
    """Return what the rows themselves say."""
    with store._database.read() as connection:
        return sum(
            connection.execute(
                select(func.coalesce(func.sum(func.length(text)), 0)).where(
                    text.table.c.project_id == project
                )
            ).scalar_one()
            for text in (PROFILES.c.document, GRAPHS.c.document, PLANS.c.document, ANSWERS.c.answer)
        )


def test_every_way_in_and_out_is_counted(store, clock, a_profile):
    documents = store.documents
    assert counted(store) == 0
    profile_id = documents.put(HERE, a_profile).id
    documents.put(HERE, a_profile)
    documents.put(HERE, a_graph())
    plan_id = documents.put_plan(HERE, infeasible(profile_id, 2.0)).id
    documents.put_plan(HERE, infeasible(profile_id, 3.0))
    assert counted(store) == summed(store) > 0
    documents.delete("plan", HERE, plan_id)
    assert counted(store) == summed(store)
    clock.time += timedelta(days=9)
    store.expire(Retention(jobs_days=None, audit_days=None, plans_days=5))
    assert counted(store) == summed(store) == 0


def test_a_project_stores_as_much_as_is_allowed_and_another_is_not_disturbed(address, a_profile):
    size = len(a_profile.to_json())
    with closing(Store(address, max_project_bytes=size)) as store:
        other = store.projects.create("other").id
        kept = store.documents.put(HERE, a_profile).id
        store.documents.put(HERE, a_profile)
        with pytest.raises(StorageFull, match="project_stored_bytes"):
            store.documents.put_plan(HERE, infeasible(kept))
        assert counted(store) == summed(store) == size, "nothing of it is stored or counted"
        assert store.documents.put(other, a_profile).id == kept
        store.documents.delete("profile", HERE, kept)
        store.documents.put(HERE, a_profile)


def test_the_limit_is_exact_when_many_store_at_once(address, a_profile):
    profiles = [a_profile.model_copy(update={"model": f"m{number:02}"}) for number in range(12)]
    size = len(profiles[0].to_json())
    with closing(Store(address, max_project_bytes=5 * size)) as store:

        def put(profile):
            try:
                return bool(store.documents.put(HERE, profile))
            except StorageFull:
                return False

        with ThreadPoolExecutor(4) as pool:
            assert sum(pool.map(put, profiles)) == 5
        assert counted(store) == summed(store) == 5 * size


def test_answers_kept_for_idempotency_keys_count_until_they_expire(address, clock):
    """One small request under fresh keys stored megabytes each time, which no project was charged.

    An answer counts while it is kept, and a claim without one counts nothing.
    """
    answer = Answer(status=201, body="x" * 1000)
    size = len(answer.model_dump_json())
    with closing(Store(address, now=lambda: clock.time, max_project_bytes=2 * size)) as store:
        keys = store.idempotency
        for key in "ab":
            assert keys.claim(HERE, key, "d", holder="us") is None
            assert keys.complete(HERE, key, answer, holder="us") == answer
            assert keys.complete(HERE, key, answer, holder="us") == answer, "kept once"
        assert keys.claim(HERE, "c", "d", holder="us") is None
        with pytest.raises(StorageFull, match="Idempotency-Key"):
            keys.complete(HERE, "c", answer, holder="us")
        keys.release(HERE, "c", holder="us")
        assert keys.claim(HERE, "never answered", "d", holder="us") is None
        assert counted(store) == summed(store) == 2 * size
        clock.time += timedelta(days=1)
        for key in ("a", "never answered"):
            assert keys.claim(HERE, key, "d", holder="us") is None
        assert counted(store) == summed(store) == size, "a key used again gives its size back"
        store.expire(Retention(jobs_days=None, audit_days=None, plans_days=None))
        assert counted(store) == summed(store) == 0
