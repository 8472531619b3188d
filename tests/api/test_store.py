"""The store's contract, run over every backend."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from stagewright.api.records import InfeasibleAnswer, PlanRecord
from stagewright.api.settings import IN_MEMORY
from stagewright.api.store import NotFound, Store
from stagewright.api.store_sqlite import SCHEMA_VERSION, SQLiteStore
from stagewright.core.cluster import Cluster
from stagewright.core.errors import InvalidInput
from stagewright.core.plan import Plan, PlanOptions
from stagewright.core.profile import Profile
from stagewright.planner.plan import plan

START = datetime(2025, 1, 1, tzinfo=UTC)


def ticking_clock() -> Callable[[], datetime]:
    ticks = iter(range(10**6))
    return lambda: START + timedelta(seconds=next(ticks))


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    database = IN_MEMORY if request.param == "memory" else tmp_path / "store.db"
    made = SQLiteStore(database, now=ticking_clock())
    yield made
    made.close()


@pytest.fixture
def a_profile(profile: dict[str, Any]) -> Profile:
    return Profile.model_validate(profile)


@pytest.fixture
def a_plan(a_profile: Profile) -> Plan:
    return plan(a_profile, Cluster.parse("2xcpu"))


def planned(profile_id: str, answer: Plan, devices: str = "2xcpu") -> PlanRecord:
    return PlanRecord(
        status="planned",
        profile_id=profile_id,
        cluster=Cluster.parse(devices),
        options=PlanOptions(),
        plan=answer,
    )


def infeasible(profile_id: str, required: float = 2.0) -> PlanRecord:
    return PlanRecord(
        status="infeasible",
        profile_id=profile_id,
        cluster=Cluster.parse("1x1GB"),
        options=PlanOptions(),
        infeasible=InfeasibleAnswer(
            constraint="memory", required=required, available=1.0, message="too small"
        ),
    )


class TestContract:
    def test_a_profile_comes_back_equal_under_its_content_id(self, store, a_profile):
        stored = store.put_profile(a_profile)
        assert stored.id == a_profile.content_id()
        assert store.profile(stored.id).profile == a_profile
        assert store.profile(stored.id).created_at == stored.created_at == START

    def test_the_same_profile_twice_is_one_row(self, store, a_profile):
        again = Profile.from_json(a_profile.to_json())
        assert store.put_profile(a_profile) == store.put_profile(again)

    def test_a_plan_comes_back_with_its_whole_request(self, store, a_profile, a_plan):
        record = planned(store.put_profile(a_profile).id, a_plan)
        stored = store.put_plan(record)
        assert store.plan(stored.id) == stored
        assert stored.id == record.record_id()
        for field in PlanRecord.model_fields:
            assert getattr(stored, field) == getattr(record, field)

    def test_infeasible_is_kept_as_well(self, store, a_profile):
        stored = store.put_plan(infeasible(store.put_profile(a_profile).id))
        assert store.plan(stored.id).infeasible.required == 2.0
        assert store.plan(stored.id).plan is None

    def test_the_same_answer_twice_is_one_row(self, store, a_profile, a_plan):
        record = planned(store.put_profile(a_profile).id, a_plan)
        assert store.put_plan(record) == store.put_plan(record)
        assert len(store.plans(limit=10)) == 1

    def test_one_plan_for_two_clusters_is_two_rows(self, store, a_profile, a_plan):
        profile_id = store.put_profile(a_profile).id
        store.put_plan(planned(profile_id, a_plan, "2xcpu"))
        store.put_plan(planned(profile_id, a_plan, "3xcpu"))
        assert len(store.plans(limit=10)) == 2

    def test_plans_are_listed_newest_first_up_to_the_limit(self, store, a_profile):
        profile_id = store.put_profile(a_profile).id
        ids = [store.put_plan(infeasible(profile_id, need)).id for need in (2.0, 3.0, 4.0)]
        assert [row.id for row in store.plans(limit=10)] == ids[::-1]
        assert [row.id for row in store.plans(limit=2)] == ids[:0:-1]

    def test_a_summary_says_what_was_planned(self, store, a_profile, a_plan):
        stored = store.put_plan(planned(store.put_profile(a_profile).id, a_plan))
        (row,) = store.plans(limit=1)
        assert (row.id, row.created_at, row.status) == (stored.id, stored.created_at, "planned")
        assert (row.model, row.num_stages) == (a_plan.model, a_plan.num_stages)
        assert row.step_time_s == a_plan.step_time_s

    def test_a_plan_needs_its_profile(self, store, a_plan):
        with pytest.raises(NotFound, match="profile_nowhere"):
            store.put_plan(planned("profile_nowhere", a_plan))
        assert store.plans(limit=10) == []

    @pytest.mark.parametrize("identifier", ["", "plan_0", "' OR 1=1 --", "\x00", "x" * 10_000])
    def test_an_unknown_id_is_not_found(self, store, identifier):
        with pytest.raises(NotFound):
            store.plan(identifier)
        with pytest.raises(NotFound):
            store.profile(identifier)

    def test_threads_may_write_and_read_at_once(self, store, a_profile):
        profile_id = store.put_profile(a_profile).id
        together = threading.Barrier(8)

        def write(index: int) -> str:
            together.wait(timeout=10)
            return store.plan(store.put_plan(infeasible(profile_id, float(index // 2))).id).id

        with ThreadPoolExecutor(8) as pool:
            ids = list(pool.map(write, range(8)))
        assert len(set(ids)) == 4
        assert {row.id for row in store.plans(limit=100)} == set(ids)

    def test_it_answers_and_closes_twice(self, store):
        store.check()
        store.close()
        store.close()


class TestFile:
    def test_what_was_written_is_there_after_opening_again(self, tmp_path, a_profile):
        first = SQLiteStore(tmp_path / "store.db")
        profile_id = first.put_profile(a_profile).id
        first.close()
        second = SQLiteStore(tmp_path / "store.db")
        assert second.profile(profile_id).profile == a_profile
        second.close()

    def test_two_processes_may_have_it_open(self, tmp_path, a_profile):
        stores = [SQLiteStore(tmp_path / "store.db") for _ in range(2)]
        profile_id = stores[0].put_profile(a_profile).id
        assert stores[1].profile(profile_id).profile == a_profile
        for opened in stores:
            opened.close()

    def test_a_write_waits_for_another_write_instead_of_failing(self, tmp_path, a_profile):
        """Cause: a transaction that starts by reading cannot wait for the write lock later."""
        store = SQLiteStore(tmp_path / "store.db")
        other = sqlite3.connect(tmp_path / "store.db", check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")
        threading.Timer(0.3, other.rollback).start()
        assert store.put_profile(a_profile).id == a_profile.content_id()
        other.close()
        store.close()

    def test_reading_goes_on_while_another_writes(self, tmp_path, a_profile):
        """Cause: without write-ahead logging a reader waits for the writer."""
        store = SQLiteStore(tmp_path / "store.db")
        store.put_profile(a_profile)
        other = sqlite3.connect(tmp_path / "store.db")
        other.execute("BEGIN EXCLUSIVE")
        other.execute("UPDATE profiles SET created_at = ''")
        assert store.profile(a_profile.content_id()).profile == a_profile
        other.rollback()
        other.close()
        store.close()

    def test_another_releases_database_is_refused(self, tmp_path):
        SQLiteStore(tmp_path / "store.db").close()
        with sqlite3.connect(tmp_path / "store.db") as connection:
            connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
        connection.close()
        with pytest.raises(InvalidInput, match=f"version {SCHEMA_VERSION + 1}"):
            SQLiteStore(tmp_path / "store.db")

    def test_a_file_that_is_no_database_is_refused(self, tmp_path):
        (tmp_path / "notes.txt").write_text("no database at all, but longer than a header" * 10)
        with pytest.raises(InvalidInput, match=r"notes\.txt"):
            SQLiteStore(tmp_path / "notes.txt")

    def test_a_folder_that_is_missing_is_named(self, tmp_path):
        with pytest.raises(InvalidInput, match="nowhere"):
            SQLiteStore(tmp_path / "nowhere" / "store.db")
