"""The store's contract for jobs, run over every kind of database."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from stagewright.api.store import jobs as jobs_module
from stagewright.api.store.errors import RecordNotFound, TooManyJobs
from stagewright.api.store.jobs import MAX_ENDED_REQUEST
from stagewright.api.store.records import DEFAULT_PROJECT as HERE
from stagewright.api.store.records import JobRequest
from stagewright.core.profile.profile import Profile
from tests.api.stored import a_graph, infeasible

REQUEST = JobRequest(kind="plan", request_json='{"model": "Tiny"}')


@pytest.fixture
def a_profile(profile: dict[str, Any]) -> Profile:
    return Profile.model_validate(profile)


def side_by_side(work: Callable[[int], Any], workers: int = 6) -> list[Any]:
    """What so many threads return that start at one moment."""
    together = threading.Barrier(workers)

    def start(index: int) -> Any:
        together.wait(timeout=20)
        return work(index)

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(start, range(workers)))


def kinds(store, job_id: str) -> list[str]:
    events = store.jobs.events(HERE, job_id)
    assert [event.number for event in events] == list(range(1, len(events) + 1))
    return [event.kind for event in events]


class TestLife:
    def test_a_job_runs_and_succeeds_with_its_plan(self, store, clock, a_profile):
        deadline = clock.time + timedelta(hours=1)
        request = REQUEST.model_copy(update={"deadline_at": deadline, "needs": "H200"})
        queued = store.jobs.submit(HERE, request)
        assert (queued.state, queued.attempt, queued.is_finished) == ("queued", 0, False)
        assert queued.needs == "H200"
        assert store.jobs.request_json(queued.id) == request.request_json
        assert queued.deadline_at == deadline
        running = store.jobs.start(queued.id, attempt=0, worker="w1")
        assert (running.state, running.attempt, running.worker) == ("running", 1, "w1")
        assert store.jobs.report(queued.id, 1, "progress", '{"done": 0.5}')
        record = infeasible(a_profile.content_id())
        done = store.jobs.finish(queued.id, 1, "succeeded", profile=a_profile, plan=record)
        assert (done.state, done.result_id) == ("succeeded", record.record_id())
        assert done.is_finished
        assert done == store.jobs.get(HERE, queued.id)
        assert store.documents.plan(HERE, done.result_id).profile_id == a_profile.content_id()
        assert store.jobs.unfinished() == []
        assert kinds(store, queued.id) == ["queued", "started", "progress", "succeeded"]
        assert store.jobs.events(HERE, queued.id, after=2, limit=1)[0].data_json == '{"done": 0.5}'
        assert store.jobs.events(HERE, queued.id, after=4) == []

    @pytest.mark.parametrize("state", ["failed", "cancelled"])
    def test_other_ends_say_why(self, store, state):
        job = store.jobs.submit(HERE, REQUEST)
        store.jobs.start(job.id, attempt=0, worker="w")
        ended = store.jobs.finish(job.id, 1, state, outcome_json='{"title": "Too large"}')
        assert (ended.state, ended.result_id) == (state, None)
        assert ended.outcome_json == '{"title": "Too large"}'

    def test_the_result_is_the_last_thing_made(self, store, a_profile):
        def result_of(**made: Any) -> str | None:
            job = store.jobs.submit(HERE, REQUEST)
            store.jobs.start(job.id, attempt=0, worker="w")
            return store.jobs.finish(job.id, 1, "succeeded", **made).result_id

        profile_id = a_profile.content_id()
        assert result_of(profile=a_profile) == profile_id
        assert result_of(profile=a_profile, plan=infeasible(profile_id)).startswith("plan_")
        assert result_of(result_id="plan_before") == "plan_before"
        assert result_of() is None

    def test_a_plan_without_its_profile_ends_nothing(self, store, a_profile):
        job = store.jobs.submit(HERE, REQUEST)
        store.jobs.start(job.id, attempt=0, worker="w")
        with pytest.raises(RecordNotFound, match="profile_nowhere"):
            store.jobs.finish(
                job.id, 1, "succeeded", profile=a_profile, plan=infeasible("profile_nowhere")
            )
        assert store.jobs.get(HERE, job.id).state == "running"
        assert store.documents.profiles(HERE, limit=1).items == ()
        assert kinds(store, job.id) == ["queued", "started"]

    def test_reports_beyond_the_limit_are_dropped_and_the_end_is_kept(self, store, monkeypatch):
        monkeypatch.setattr(jobs_module, "MAX_PROGRESS_EVENTS", 4)
        job = store.jobs.submit(HERE, REQUEST)
        store.jobs.start(job.id, attempt=0, worker="w")
        assert all(store.jobs.report(job.id, 1, "progress") for _ in range(5))
        store.jobs.finish(job.id, 1, "failed")
        assert kinds(store, job.id) == ["queued", "started", "progress", "progress", "failed"]


class TestAttempts:
    def test_of_two_workers_that_start_it_one_does(self, store):
        job = store.jobs.submit(HERE, REQUEST)
        started = side_by_side(
            lambda index: store.jobs.start(job.id, attempt=0, worker=f"w{index}")
        )
        (winner,) = [found for found in started if found is not None]
        assert store.jobs.get(HERE, job.id) == winner
        assert kinds(store, job.id) == ["queued", "started"]

    def test_an_attempt_overtaken_changes_nothing(self, store, a_profile):
        job = store.jobs.submit(HERE, REQUEST)
        store.jobs.start(job.id, attempt=0, worker="old")
        store.jobs.start(job.id, attempt=1, worker="new")
        late = infeasible(a_profile.content_id())
        assert store.jobs.beat(job.id, 1) is None
        assert not store.jobs.report(job.id, 1, "progress")
        assert store.jobs.requeue(job.id, 1) is None
        assert store.jobs.finish(job.id, 1, "succeeded", profile=a_profile, plan=late) is None
        assert store.documents.plans(HERE, limit=1).items == ()
        assert store.documents.profiles(HERE, limit=1).items == ()
        assert store.jobs.beat(job.id, 2).worker == "new"
        assert store.jobs.finish(job.id, 2, "failed").attempt == 2

    def test_of_many_ends_one_is_committed(self, store, a_profile):
        """Compare-and-set on the attempt, whoever else believes to run the job."""
        store.documents.put(HERE, a_profile)
        job = store.jobs.submit(HERE, REQUEST)
        for attempt in range(3):
            store.jobs.start(job.id, attempt=attempt, worker=f"w{attempt}")

        def end(index: int) -> Any:
            record = infeasible(a_profile.content_id(), required=float(2 + index))
            return store.jobs.finish(job.id, 1 + index % 3, "succeeded", plan=record)

        (winner,) = [found for found in side_by_side(end) if found is not None]
        assert winner.attempt == 3
        assert [row.id for row in store.documents.plans(HERE, limit=9).items] == [winner.result_id]
        assert kinds(store, job.id)[-1:] == ["succeeded"]
        assert kinds(store, job.id).count("succeeded") == 1
        assert store.jobs.start(job.id, attempt=3, worker="late") is None

    def test_events_reported_side_by_side_are_numbered_without_gaps(self, store):
        job = store.jobs.submit(HERE, REQUEST)
        store.jobs.start(job.id, attempt=0, worker="w")
        side_by_side(lambda index: [store.jobs.report(job.id, 1, "progress") for _ in range(5)])
        assert len(kinds(store, job.id)) == 2 + 6 * 5

    def test_a_job_given_back_can_be_started_again(self, store):
        job = store.jobs.submit(HERE, REQUEST)
        store.jobs.start(job.id, attempt=0, worker="draining")
        given_back = store.jobs.requeue(job.id, 1)
        assert (given_back.state, given_back.worker) == ("queued", None)
        assert store.jobs.finish(job.id, 1, "failed") is None
        assert store.jobs.start(job.id, attempt=1, worker="next").attempt == 2

    def test_a_beat_moves_the_sign_of_life(self, store, clock):
        job = store.jobs.submit(HERE, REQUEST)
        store.jobs.start(job.id, attempt=0, worker="w")
        clock.time += timedelta(minutes=5)
        assert store.jobs.beat(job.id, 1).heartbeat_at == clock.time


KILLED = """
import os, signal, sys
from stagewright.api.store.documents import DocumentStore
from stagewright.api.store.store import Store
from tests.api.stored import a_graph
keep = DocumentStore.insert
def killed(*made):
    keep(*made)
    os.kill(os.getpid(), signal.SIGKILL)
DocumentStore.insert = killed
Store(sys.argv[1]).jobs.finish(sys.argv[2], 1, "succeeded", profile=a_graph())
"""


@pytest.mark.parametrize("address", ["sqlite", "postgresql"], indirect=True)
def test_killed_while_it_commits_its_end_nothing_of_it_is_there(store, address, repository):
    """And the next attempt finds no lock of the dead one."""
    job = store.jobs.submit(HERE, REQUEST)
    store.jobs.start(job.id, attempt=0, worker="w")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, address, job.id], cwd=repository, capture_output=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert store.jobs.get(HERE, job.id).state == "running"
    assert store.documents.graphs(HERE, limit=1).items == ()
    assert kinds(store, job.id) == ["queued", "started"]
    store.jobs.start(job.id, attempt=1, worker="next")
    assert store.jobs.finish(job.id, 2, "succeeded", profile=a_graph()).attempt == 2


class TestCancel:
    def test_a_queued_job_ends_at_once(self, store):
        job = store.jobs.submit(HERE, REQUEST)
        assert store.jobs.request_cancel(HERE, job.id).state == "cancelled"
        assert store.jobs.start(job.id, attempt=0, worker="w") is None
        assert store.jobs.request_cancel(HERE, job.id).state == "cancelled"
        assert kinds(store, job.id) == ["queued", "cancelled"]

    def test_a_running_job_is_told_and_its_worker_ends_it(self, store):
        job = store.jobs.submit(HERE, REQUEST)
        store.jobs.start(job.id, attempt=0, worker="w")
        for _ in range(2):
            asked = store.jobs.request_cancel(HERE, job.id)
            assert (asked.state, asked.cancel_requested) == ("running", True)
        assert store.jobs.beat(job.id, 1).cancel_requested
        assert store.jobs.start(job.id, attempt=1, worker="other") is None
        assert store.jobs.finish(job.id, 1, "cancelled").state == "cancelled"
        assert kinds(store, job.id) == ["queued", "started", "cancel-requested", "cancelled"]

    def test_a_job_that_ended_stays_as_it_ended(self, store):
        job = store.jobs.submit(HERE, REQUEST)
        store.jobs.start(job.id, attempt=0, worker="w")
        store.jobs.finish(job.id, 1, "succeeded", result_id="plan_1")
        assert store.jobs.request_cancel(HERE, job.id).state == "succeeded"
        assert not store.jobs.get(HERE, job.id).cancel_requested

    def test_one_that_is_given_back_is_cancelled_not_queued(self, store):
        job = store.jobs.submit(HERE, REQUEST)
        store.jobs.start(job.id, attempt=0, worker="w")
        store.jobs.request_cancel(HERE, job.id)
        assert store.jobs.requeue(job.id, 2) is None
        assert store.jobs.requeue(job.id, 1).state == "cancelled"
        assert [event.kind for event in store.jobs.events(HERE, job.id)][-1] == "cancelled"
        assert store.jobs.unfinished() == []


class TestSubmit:
    @pytest.mark.parametrize("end", ["failed", "cancelled", "given back", "queued"])
    def test_a_key_whose_job_came_to_nothing_is_free(self, store, end):
        request = REQUEST.model_copy(update={"submit_key": "a"})
        job = store.jobs.submit(HERE, request)
        if end != "queued":
            store.jobs.start(job.id, attempt=0, worker="w")
        if end == "given back":
            store.jobs.request_cancel(HERE, job.id)
            store.jobs.requeue(job.id, 1)
        elif end == "queued":
            store.jobs.request_cancel(HERE, job.id)
        else:
            store.jobs.finish(job.id, 1, end)
        assert store.jobs.submit(HERE, request).id != job.id

    def test_the_same_key_is_the_same_job_also_when_it_has_ended(self, store):
        request = REQUEST.model_copy(update={"submit_key": "a"})
        jobs = side_by_side(lambda index: store.jobs.submit(HERE, request))
        assert len({job.id for job in jobs}) == 1
        store.jobs.start(jobs[0].id, attempt=0, worker="w")
        store.jobs.finish(jobs[0].id, 1, "succeeded")
        assert store.jobs.submit(HERE, request).state == "succeeded"
        elsewhere = store.projects.create("elsewhere").id
        assert store.jobs.submit(elsewhere, request).id != jobs[0].id

    def test_without_a_key_every_submission_is_a_job(self, store):
        assert store.jobs.submit(HERE, REQUEST).id != store.jobs.submit(HERE, REQUEST).id

    def test_the_limit_holds_for_submissions_side_by_side(self, store):
        def submit(index: int) -> bool:
            try:
                store.jobs.submit(HERE, REQUEST, max_unfinished=3)
            except TooManyJobs:
                return False
            return True

        assert sum(side_by_side(submit)) == 3
        store.jobs.request_cancel(HERE, store.jobs.unfinished()[0].id)
        assert submit(0)
        assert not submit(0)

    def test_the_limit_is_of_the_key_that_asks(self, store):
        for key in ("key_a", "key_b"):
            request = REQUEST.model_copy(update={"key_id": key})
            store.jobs.submit(HERE, request, max_unfinished=1)
            with pytest.raises(TooManyJobs, match="limit of 1 unfinished jobs"):
                store.jobs.submit(HERE, request, max_unfinished=1)

    def test_a_project_that_is_not_there_is_not_found(self, store):
        with pytest.raises(RecordNotFound, match="project_nowhere"):
            store.jobs.submit("project_nowhere", REQUEST)

    def test_one_on_its_way_is_found_by_its_digest(self, store):
        request = REQUEST.model_copy(update={"request_digest": "d1"})
        first = store.jobs.submit(HERE, request)
        store.jobs.submit(HERE, request)
        assert store.jobs.unfinished_like(HERE, "d1").id == first.id
        assert store.jobs.unfinished_like(HERE, "d2") is None
        assert store.jobs.unfinished_like(store.projects.create("other").id, "d1") is None
        store.jobs.start(first.id, attempt=0, worker="w")
        assert store.jobs.unfinished_like(HERE, "d1").id == first.id
        store.jobs.request_cancel(HERE, first.id)
        assert store.jobs.unfinished_like(HERE, "d1").id != first.id


@pytest.mark.parametrize("how", ["succeeded", "cancelled while queued", "cancelled when requeued"])
def test_a_job_that_ended_keeps_no_large_request(store, how):
    """A request has up to 16 MiB, charged to nobody, and its row stayed for a month."""
    large, small = (
        store.jobs.submit(HERE, JobRequest(kind="profile", request_json=text))
        for text in ('"' + "x" * MAX_ENDED_REQUEST + '"', "x" * MAX_ENDED_REQUEST)
    )
    for job in (large, small):
        kept = store.jobs.request_json(job.id)
        if how == "cancelled while queued":
            store.jobs.request_cancel(HERE, job.id)
            continue
        store.jobs.start(job.id, attempt=0, worker="w")
        assert store.jobs.request_json(job.id) == kept
        if how == "succeeded":
            store.jobs.finish(job.id, 1, "succeeded")
        else:
            store.jobs.request_cancel(HERE, job.id)
            store.jobs.requeue(job.id, 1)
    assert store.jobs.get(HERE, large.id).is_finished
    assert store.jobs.request_json(large.id) == ""
    assert len(store.jobs.request_json(small.id)) == MAX_ENDED_REQUEST


class TestReading:
    def test_lists_are_paged_and_filtered(self, store):
        ids = [store.jobs.submit(HERE, REQUEST).id for _ in range(4)]
        store.jobs.request_cancel(HERE, ids[1])
        first = store.jobs.list(HERE, limit=2, state="queued")
        store.jobs.submit(HERE, REQUEST)
        second = store.jobs.list(HERE, limit=2, state="queued", cursor=first.next_cursor)
        assert [job.id for job in (*first.items, *second.items)] == [ids[3], ids[2], ids[0]]
        assert second.next_cursor is None

    def test_the_unfinished_of_every_project_come_oldest_first(self, store):
        here = store.jobs.submit(HERE, REQUEST)
        there = store.jobs.submit(store.projects.create("there").id, REQUEST)
        store.jobs.start(there.id, attempt=0, worker="w")
        assert [job.id for job in store.jobs.unfinished()] == [here.id, there.id]

    def test_another_projects_job_is_not_there(self, store):
        job = store.jobs.submit(HERE, REQUEST)
        other = store.projects.create("other").id
        for read in (store.jobs.get, store.jobs.events, store.jobs.request_cancel):
            with pytest.raises(RecordNotFound):
                read(other, job.id)
        assert store.jobs.list(other, limit=9).items == ()
        assert store.jobs.get(HERE, job.id).state == "queued"
