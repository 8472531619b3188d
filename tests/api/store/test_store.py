"""The store's contract for documents, run over every kind of database."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import timedelta
from typing import Any

import pytest

from stagewright.api.store import database as database_module
from stagewright.api.store.database import database_url
from stagewright.api.store.documents import select_plan_summaries
from stagewright.api.store.errors import ProfileInUse, RecordNotFound, StoreUnavailable
from stagewright.api.store.records import DEFAULT_PROJECT as HERE
from stagewright.api.store.store import Store
from stagewright.api.store.tables import PLANS
from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import InvalidInput
from stagewright.core.plan.plan import Plan
from stagewright.core.profile.profile import Profile
from stagewright.core.service.documents import PlanRecord, StoredPlan
from stagewright.planner.plan import plan
from tests.api.stored import a_graph, infeasible, planned


@pytest.fixture
def a_profile(profile: dict[str, Any]) -> Profile:
    return Profile.model_validate(profile)


@pytest.fixture
def a_plan(a_profile: Profile) -> Plan:
    return plan(a_profile, Cluster.parse("2xcpu"))


@pytest.fixture
def elsewhere(store: Store) -> str:
    return store.projects.create("elsewhere").id


class TestContract:
    def test_a_profile_comes_back_equal_under_its_content_id(self, store, clock, a_profile):
        stored = store.documents.put(HERE, a_profile)
        assert stored.id == a_profile.content_id()
        assert stored.created_at == clock.time
        back = store.documents.profile(HERE, stored.id)
        assert (back.profile, back.created_at) == (a_profile, stored.created_at)

    def test_what_was_just_stored_is_not_read_again(self, store, a_profile, elsewhere, monkeypatch):
        """Of 10,000 layers that took 0.7 s of processor time."""
        monkeypatch.setattr(Profile, "model_validate_json", None)
        stored = store.documents.put(HERE, a_profile)
        assert store.documents.profile(HERE, stored.id).profile == a_profile
        with pytest.raises(RecordNotFound):
            store.documents.profile(elsewhere, stored.id)

    def test_labels_of_a_plan_change_beside_it(self, store, a_profile, a_plan):
        profile_id = store.documents.put(HERE, a_profile).id
        record = planned(profile_id, a_plan)
        stored = store.documents.put_plan(HERE, record)
        assert (stored.name, stored.tags, stored.notes) == (None, (), None)
        changes = {"name": "nightly", "tags": ("team-a", "h100"), "notes": "two\nlines"}
        assert store.documents.label_plan(HERE, stored.id, changes).name == "nightly"
        store.documents.label_plan(HERE, stored.id, {"name": None})
        kept = store.documents.plan(HERE, stored.id)
        assert (kept.name, kept.tags, kept.notes) == (None, ("team-a", "h100"), "two\nlines")
        assert kept.id == stored.id == record.record_id()
        read = StoredPlan.model_validate_json(store.documents.json("plan", HERE, stored.id))
        assert read == kept
        assert store.documents.put_plan(HERE, record) == kept, "stored again, it keeps its labels"
        found = store.documents.plans(HERE, limit=9, search="TEAM-A").items
        assert [(row.id, row.tags) for row in found] == [(stored.id, ("team-a", "h100"))]

    def test_what_is_deleted_is_gone_from_its_project_alone(
        self, store, a_profile, a_plan, elsewhere
    ):
        ids = {}
        for project in (HERE, elsewhere):
            ids["profile"] = store.documents.put(project, a_profile).id
            ids["graph"] = store.documents.put(project, a_graph()).id
            ids["plan"] = store.documents.put_plan(
                project, planned(ids["profile"], a_plan), request_digest="asked"
            ).id
        with pytest.raises(ProfileInUse, match=f"of 1 plan, such as {ids['plan']}; delete the"):
            store.documents.delete("profile", HERE, ids["profile"])
        for kind in ("plan", "graph", "profile"):
            store.documents.delete(kind, HERE, ids[kind])
            for gone in (store.documents.json, store.documents.delete):
                with pytest.raises(RecordNotFound):
                    gone(kind, HERE, ids[kind])
            assert store.documents.json(kind, elsewhere, ids[kind])
        assert store.reuse.recall(HERE, "plan", "asked") is None
        assert store.reuse.recall(elsewhere, "plan", "asked") == ids["plan"]
        again = store.documents.put(HERE, a_profile)
        assert store.documents.profile(HERE, again.id).profile == a_profile

    def test_a_profile_is_deleted_or_planned_from_but_not_both(self, store, a_profile, a_plan):
        """Plans that are stored while their profile is deleted find it, or are refused."""
        record = planned(a_profile.content_id(), a_plan)

        def put():
            with suppress(RecordNotFound):
                store.documents.put_plan(HERE, record)
                return True

        def delete():
            with suppress(ProfileInUse):
                store.documents.delete("profile", HERE, record.profile_id)
                return True

        with ThreadPoolExecutor(2) as threads:
            for _ in range(20):
                store.documents.put(HERE, a_profile)
                done = [task.result() for task in (threads.submit(put), threads.submit(delete))]
                assert sorted(done, key=bool) == [None, True]
                if done[0]:
                    store.documents.delete("plan", HERE, record.record_id())

    def test_the_same_profile_twice_is_one_row(self, store, a_profile):
        again = Profile.from_json(a_profile.to_json())
        first = store.documents.put(HERE, a_profile)
        assert store.documents.put(HERE, again) == first
        assert len(store.documents.profiles(HERE, limit=10).items) == 1

    def test_a_graph_comes_back_equal_and_once(self, store):
        graph = a_graph()
        stored = store.documents.put(HERE, graph)
        assert store.documents.put(HERE, graph) == stored
        assert store.documents.graph(HERE, stored.id).graph == graph
        (row,) = store.documents.graphs(HERE, limit=10).items
        assert (row.id, row.model, row.num_layers) == (graph.content_id(), "Tiny", 1)

    def test_a_plan_comes_back_with_its_whole_request(self, store, a_profile, a_plan):
        record = planned(store.documents.put(HERE, a_profile).id, a_plan)
        stored = store.documents.put_plan(HERE, record)
        assert store.documents.plan(HERE, stored.id) == stored
        assert stored.id == record.record_id()
        for field in PlanRecord.model_fields:
            assert getattr(stored, field) == getattr(record, field)

    def test_infeasible_is_kept_as_well(self, store, a_profile):
        profile_id = store.documents.put(HERE, a_profile).id
        stored = store.documents.put_plan(HERE, infeasible(profile_id))
        assert store.documents.plan(HERE, stored.id).infeasible.required == 2.0
        assert store.documents.plan(HERE, stored.id).plan is None

    def test_the_same_answer_twice_is_one_row(self, store, a_profile, a_plan):
        record = planned(store.documents.put(HERE, a_profile).id, a_plan)
        assert store.documents.put_plan(HERE, record) == store.documents.put_plan(HERE, record)
        assert len(store.documents.plans(HERE, limit=10).items) == 1

    def test_one_plan_for_two_clusters_is_two_rows(self, store, a_profile, a_plan):
        profile_id = store.documents.put(HERE, a_profile).id
        store.documents.put_plan(HERE, planned(profile_id, a_plan, "2xcpu"))
        store.documents.put_plan(HERE, planned(profile_id, a_plan, "3xcpu"))
        assert len(store.documents.plans(HERE, limit=10).items) == 2

    def test_summaries_say_what_is_stored(self, store, a_profile, a_plan):
        profile_id = store.documents.put(HERE, a_profile).id
        stored = store.documents.put_plan(HERE, planned(profile_id, a_plan))
        (row,) = store.documents.plans(HERE, limit=1).items
        assert (row.id, row.created_at, row.status) == (stored.id, stored.created_at, "planned")
        assert (row.model, row.num_stages) == (a_plan.model, a_plan.num_stages)
        assert row.step_time_s == a_plan.step_time_s
        (row,) = store.documents.profiles(HERE, limit=1).items
        assert (row.id, row.model, row.num_layers, row.estimated) == (
            profile_id, a_profile.model, len(a_profile.layers), False,
        )  # fmt: skip
        assert (row.family, row.num_parameters) == (None, 4 * 2**20)
        assert store.documents.profile_summary(HERE, profile_id) == row

    def test_a_plans_line_says_which_model_on_what(self, store, a_profile, a_plan):
        spec = {"family": "gpt2", "config": {}}
        named = Profile.model_validate({**a_profile.model_dump(), "spec": spec})
        profile_id = store.documents.put(HERE, named).id
        store.documents.put_plan(HERE, planned(profile_id, a_plan, "2x2x80GB"))
        store.documents.put_plan(HERE, infeasible(profile_id))
        nothing, found = store.documents.plans(HERE, limit=9).items
        for row in (nothing, found):
            assert (row.model, row.family) == (a_profile.model, "gpt2")
            assert (row.num_layers, row.num_parameters) == (4, 4 * 2**20)
            assert store.documents.plan_summary(HERE, row.id) == row
        assert (found.devices, found.schedule) == ("4 x 80GB", "1f1b")
        assert (nothing.devices, nothing.num_stages) == ("1 x 1GB", None)

    def test_a_page_of_a_list_reads_no_more_than_it_shows(self, store):
        """Without the index a page sorted all plans of the project: 8 ms of 3,000."""
        statement = select_plan_summaries(HERE, "").order_by(PLANS.c.position.desc()).limit(51)
        with store.documents._database.read() as connection:
            if connection.dialect.name != "sqlite":
                pytest.skip("that one looks at how many there are before it chooses")
            text = statement.compile(connection, compile_kwargs={"literal_binds": True})
            steps = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}").all()
        assert not any("TEMP B-TREE" in step[-1] for step in steps)

    def test_plans_are_found_by_words(self, store, a_profile, a_plan, elsewhere):
        profile_id = store.documents.put(HERE, a_profile).id
        other = a_profile.model_copy(update={"model": "100%_\\U-Net"})
        other_id = store.documents.put(HERE, other).id
        first = store.documents.put_plan(HERE, planned(profile_id, a_plan, "2x80GB")).id
        second = store.documents.put_plan(HERE, planned(other_id, a_plan, "2xcpu")).id
        third = store.documents.put_plan(HERE, infeasible(other_id)).id

        def found(search):
            return {row.id for row in store.documents.plans(HERE, limit=9, search=search).items}

        assert found("") == found("  ") == found("\0") == {first, second, third}
        assert found("EXAMPLE") == {first}
        assert found("u-net") == {second, third}
        assert found("u-net infeasible") == {third}
        assert found("80gb 1F1B planned") == {first}
        assert found(second) == {second}
        assert found("%") == found("%_") == found("\\") == {second, third}
        assert found("' OR 1=1 --") == found("\ud800") == set()
        assert store.documents.plans(elsewhere, limit=9, search="example").items == ()
        page = store.documents.plans(HERE, limit=1, search="u-net")
        again = store.documents.plans(HERE, limit=1, search="u-net", cursor=page.next_cursor)
        assert [row.id for row in (*page.items, *again.items)] == [third, second]
        assert again.next_cursor is None

    def test_a_plan_needs_its_profile_in_its_own_project(self, store, elsewhere, a_profile, a_plan):
        record = planned(store.documents.put(elsewhere, a_profile).id, a_plan)
        with pytest.raises(RecordNotFound, match=record.profile_id):
            store.documents.put_plan(HERE, record)
        assert store.documents.plans(HERE, limit=10).items == ()

    def test_projects_see_nothing_of_each_other(self, store, elsewhere, a_profile, a_plan):
        record = planned(store.documents.put(HERE, a_profile).id, a_plan)
        made = store.documents.put_plan(HERE, record)
        graph_id = store.documents.put(HERE, a_graph()).id
        for read, identifier in [
            (store.documents.plan, made.id),
            (store.documents.profile, record.profile_id),
            (store.documents.graph, graph_id),
        ]:
            with pytest.raises(RecordNotFound):
                read(elsewhere, identifier)
        for listed in (store.documents.plans, store.documents.profiles, store.documents.graphs):
            assert listed(elsewhere, limit=10).items == ()

    def test_the_same_content_in_two_projects_is_two_rows(self, store, elsewhere, a_profile):
        here = store.documents.put(HERE, a_profile)
        there = store.documents.put(elsewhere, a_profile)
        assert here.id == there.id
        assert here.created_at < there.created_at
        assert store.documents.profile(HERE, here.id).created_at == here.created_at

    def test_an_unknown_id_is_not_found(self, store):
        for identifier in ("", "plan_0", "' OR 1=1 --", "\0", "\ud800", "x" * 9999):
            documents = store.documents
            for read in (
                documents.plan, documents.profile, documents.graph, documents.plan_summary,
                documents.profile_summary,
            ):  # fmt: skip
                with pytest.raises(RecordNotFound):
                    read(HERE, identifier)

    def test_names_that_postgresql_cannot_hold_are_kept_readable(self, store):
        stored = store.documents.put(HERE, a_graph("a\0b"))
        assert store.documents.graph(HERE, stored.id).graph.model == "a\0b"
        assert store.documents.graphs(HERE, limit=1).items[0].model == "a\ufffdb"

    def test_threads_may_write_and_read_at_once(self, store, a_profile):
        profile_id = store.documents.put(HERE, a_profile).id
        together = threading.Barrier(8)

        def write(index: int) -> str:
            together.wait(timeout=10)
            made = store.documents.put_plan(HERE, infeasible(profile_id, float(index // 2)))
            return store.documents.plan(HERE, made.id).id

        with ThreadPoolExecutor(8) as pool:
            ids = list(pool.map(write, range(8)))
        assert len(set(ids)) == 4
        listed = [row.id for row in store.documents.plans(HERE, limit=100).items]
        assert sorted(listed) == sorted(set(ids))

    def test_it_answers_and_closes_twice(self, store):
        store.check()
        store.close()
        store.close()


class TestPaging:
    @pytest.fixture
    def profile_id(self, store, a_profile) -> str:
        return store.documents.put(HERE, a_profile).id

    def put(self, store, profile_id, *needs: float, project: str = HERE) -> list[str]:
        return [
            store.documents.put_plan(project, infeasible(profile_id, need)).id for need in needs
        ]

    def test_pages_follow_each_other_newest_first(self, store, profile_id):
        ids = self.put(store, profile_id, *range(7))[::-1]
        seen, sizes, cursor = [], [], None
        while True:
            page = store.documents.plans(HERE, limit=3, cursor=cursor)
            seen += [row.id for row in page.items]
            sizes.append(len(page.items))
            cursor = page.next_cursor
            if cursor is None:
                break
        assert (seen, sizes) == (ids, [3, 3, 1])

    def test_a_full_last_page_says_that_it_is_the_last(self, store, profile_id):
        self.put(store, profile_id, 1, 2)
        assert store.documents.plans(HERE, limit=2).next_cursor is None

    def test_what_is_added_meanwhile_neither_repeats_nor_hides_a_row(
        self, store, profile_id, elsewhere, a_profile
    ):
        ids = self.put(store, profile_id, *range(4))[::-1]
        first = store.documents.plans(HERE, limit=2)
        self.put(store, profile_id, 10, 11, 12)
        store.documents.put(elsewhere, a_profile)
        self.put(store, profile_id, 13, project=elsewhere)
        second = store.documents.plans(HERE, limit=2, cursor=first.next_cursor)
        assert [row.id for row in (*first.items, *second.items)] == ids
        assert second.next_cursor is None

    def test_a_cursor_of_no_page_is_refused(self, store):
        negative, empty, huge = "cGxhbnM6LTE", "cGxhbnM6", "cGxhbnM6" + "OTk5" * 20
        for cursor in ("", "x", "0" * 2000, negative, empty, huge, "\u00e9", "\0", "\ud800"):
            with pytest.raises(InvalidInput, match="next_cursor") as refused:
                store.documents.plans(HERE, limit=2, cursor=cursor)
            assert refused.value.field == "/cursor"

    def test_a_cursor_of_another_list_is_refused(self, store, profile_id):
        self.put(store, profile_id, 1, 2)
        cursor = store.documents.plans(HERE, limit=1).next_cursor
        with pytest.raises(InvalidInput, match=r"invalid cursor .* for this list"):
            store.documents.profiles(HERE, limit=1, cursor=cursor)


class TestFile:
    def test_what_was_written_is_there_after_opening_again(self, tmp_path, a_profile):
        first = Store(tmp_path / "store.db")
        profile_id = first.documents.put(HERE, a_profile).id
        first.close()
        second = Store(tmp_path / "store.db")
        assert second.documents.profile(HERE, profile_id).profile == a_profile
        second.close()

    def test_it_is_its_owners_alone(self, tmp_path, a_profile):
        """Cause: it held hashes of keys and names of models, and everybody could read it."""
        store = Store(tmp_path / "store.db")
        store.documents.put(HERE, a_profile)
        modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
        store.close()
        assert modes == dict.fromkeys(["store.db", "store.db-wal", "store.db-shm"], 0o600)

    def test_another_process_that_closes_it_loses_no_write(self, tmp_path, a_profile):
        path = tmp_path / "stagewright.db"
        with closing(Store(str(path))) as store:
            database = store.documents._database
            profile_id = store.documents.put(HERE, a_profile).id
            with database.read(), database.read():  # the second has to connect
                look = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); "
                look += "c.execute('SELECT 1 FROM profiles').fetchall(); c.close()"
                subprocess.run([sys.executable, "-c", look, str(path)], check=True, timeout=60)
            made = store.documents.put_plan(HERE, infeasible(profile_id))
            with closing(Store(str(path))) as another:
                assert another.documents.plan(HERE, made.id).id == made.id

    def test_a_write_waits_for_another_write_instead_of_failing(self, tmp_path, a_profile):
        """Cause: a transaction that starts by reading cannot wait for the write lock later."""
        store = Store(tmp_path / "store.db")
        other = sqlite3.connect(tmp_path / "store.db", check_same_thread=False)
        other.execute("BEGIN IMMEDIATE")
        threading.Timer(0.3, other.rollback).start()
        assert store.documents.put(HERE, a_profile).id == a_profile.content_id()
        other.close()
        store.close()

    def test_threads_queue_for_writing_and_do_not_wait_for_ever(
        self, tmp_path, a_profile, monkeypatch
    ):
        """Cause: 16 threads left to SQLite's own retries; the slowest of 100 took four seconds."""
        monkeypatch.setattr(database_module, "TURN_TIMEOUT_S", 0.05)
        store = Store(tmp_path / "store.db")
        with (
            store._database.write(),
            ThreadPoolExecutor(1) as other,
            pytest.raises(StoreUnavailable, match="other writes take too long"),
        ):
            other.submit(store.documents.put, HERE, a_profile).result()
        assert store.documents.put(HERE, a_profile).id == a_profile.content_id()
        store.close()

    def test_reading_goes_on_while_another_writes(self, tmp_path, a_profile):
        """Cause: without write-ahead logging a reader waits for the writer."""
        store = Store(tmp_path / "store.db")
        store.documents.put(HERE, a_profile)
        other = sqlite3.connect(tmp_path / "store.db")
        other.execute("BEGIN EXCLUSIVE")
        other.execute("UPDATE profiles SET model = ''")
        read = store.documents.profile(HERE, a_profile.content_id())
        assert read.profile == a_profile
        other.rollback()
        other.close()
        store.close()

    def test_a_file_that_is_no_database_is_refused(self, tmp_path):
        (tmp_path / "notes.txt").write_text("no database at all, but longer than a header" * 10)
        with pytest.raises(InvalidInput, match=r"notes\.txt"):
            Store(tmp_path / "notes.txt")

    def test_a_folder_that_is_missing_is_named(self, tmp_path):
        with pytest.raises(InvalidInput, match="nowhere"):
            Store(tmp_path / "nowhere" / "store.db")


class TestAddress:
    @pytest.mark.parametrize(
        "address", ["mysql://host/name", "postgresql://host:port/x", "", "redis://x"]
    )
    def test_an_address_that_will_not_do_says_what_would(self, address):
        with pytest.raises(InvalidInput, match="give a file's path, or postgresql://"):
            Store(address)

    def test_both_spellings_of_postgresql_use_our_driver(self):
        for spelling in ("postgres", "postgresql", "postgresql+psycopg"):
            url = database_url(f"{spelling}://me@host/name")
            assert (url.drivername, url.host) == ("postgresql+psycopg", "host")


class TestPostgres:
    def test_a_server_that_is_not_there_is_unavailable_and_no_password_is_told(self, tmp_path):
        pytest.importorskip("psycopg")
        with pytest.raises(StoreUnavailable) as unavailable:
            Store(f"postgresql://me:secret@/name?host={tmp_path}")
        assert "secret" not in str(unavailable.value)

    def test_a_server_killed_and_started_again_loses_nothing(self, postgres, a_profile):
        """Nothing is read half-written, and the store finds the server again by itself."""
        store = Store(postgres.url(postgres.new_database("ready")))
        profile_id = store.documents.put(HERE, a_profile).id
        postgres.process.kill()
        postgres.process.wait()
        with pytest.raises(StoreUnavailable):
            read_often(store, profile_id)
        postgres.start()
        assert store.documents.profile(HERE, profile_id).profile == a_profile
        store.close()


def read_often(store: Store, profile_id: str) -> None:
    """Until the processes that a killed server leaves have noticed."""
    for _ in range(1000):
        store.documents.profile(HERE, profile_id)


def test_a_key_is_found_by_its_id_until_it_is_revoked_or_expires(store, clock):
    project = store.projects.create("ids").id
    made = store.keys.create(project, name="n", scopes=("read",)).key
    end = clock() + timedelta(seconds=60)
    passing = store.keys.create(project, name="p", scopes=("read",), expires_at=end).key
    assert store.keys.by_id("key_nothing") is None
    assert [store.keys.by_id(key.id).id for key in (made, passing)] == [made.id, passing.id]
    clock.time = end
    assert store.keys.by_id(passing.id) is None
    store.keys.revoke(project, made.id)
    assert store.keys.by_id(made.id) is None
