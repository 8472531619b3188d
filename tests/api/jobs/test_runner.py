"""What a runner makes of workers, databases and servers that go away; nothing is started here."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from stagewright.api.errors import WorkersUnavailable
from stagewright.api.http.examples import measure_example
from stagewright.api.jobs import async_workers as reaching_module
from stagewright.api.jobs import attempt as attempt_module
from stagewright.api.jobs import runner as runner_module
from stagewright.api.jobs.async_workers import AsyncWorkers
from stagewright.api.jobs.attempt import JobContext
from stagewright.api.jobs.messages import (
    Heartbeat,
    ProfileMeasured,
    TaskFailed,
    WorkerLost,
    WorkerMessage,
    WorkerProgress,
    WorkerStarted,
    WorkerTask,
)
from stagewright.api.jobs.notifications import JobNotifications
from stagewright.api.jobs.requests import JobSpec
from stagewright.api.jobs.runner import JobRunner
from stagewright.api.store.database import IN_MEMORY, utc_now
from stagewright.api.store.errors import StoreUnavailable
from stagewright.api.store.records import DEFAULT_PROJECT as HERE
from stagewright.api.store.records import Job, JobRequest
from stagewright.api.store.store import Store
from stagewright.core.errors import MeasurementError, OutOfMemory
from stagewright.core.profile.profile import Profile


class Puppets:
    """WorkerBackend that say what a test has them say."""

    def __init__(self) -> None:
        self.tasks: list[tuple[WorkerTask, Callable[[WorkerMessage], None]]] = []
        self.stopped: list[str] = []
        self.has: Mapping[str, int] = {"cpu": 1}
        self.is_gone = False

    def submit(self, task: WorkerTask, tell: Callable[[WorkerMessage], None]) -> None:
        if self.is_gone:
            raise WorkersUnavailable("the scheduler does not answer")
        self.tasks.append((task, tell))

    def stop(self, key: str) -> None:
        self.stopped.append(key)

    def offers(self) -> Mapping[str, int]:
        if self.is_gone:
            raise WorkersUnavailable("the scheduler does not answer")
        return self.has

    def invitation(self, needs: str) -> str:
        return f"start one that offers {needs}"

    def close(self) -> None:
        pass

    def say(self, *told: WorkerMessage, run: int = -1) -> None:
        for message in told:
            self.tasks[run][1](message)


class NoPlans:
    async def from_profile(self, *_: Any) -> Any:
        raise AssertionError("nobody asked for a plan")


@pytest.fixture
def found(profile) -> ProfileMeasured:
    return ProfileMeasured(json.dumps(profile))


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(attempt_module, "LOOK_S", 0.02)
    monkeypatch.setattr(attempt_module, "QUEUED_LOOK_S", 0.02)
    monkeypatch.setattr(attempt_module, "RETRY_S", 0.01)
    monkeypatch.setattr(runner_module, "SWEEP_S", 0.02)
    monkeypatch.setattr(runner_module, "RECONNECT_S", 0.02)
    monkeypatch.setattr(reaching_module, "RECONNECT_S", 0.02)


class Server:
    """A server's part that runs jobs, on a store that others may use."""

    def __init__(self, store: Store, silence_s: float = 30.0) -> None:
        self.store, self.workers, self.board = store, Puppets(), JobNotifications()
        self.skew = timedelta(0)
        context = JobContext(
            store,
            AsyncWorkers(self.workers),
            NoPlans(),
            self.board,
            max_attempts=2,
            silence_s=silence_s,
            now=lambda: utc_now() + self.skew,
        )
        self.runner = JobRunner(context)

    async def given(self, number: int = 1) -> None:
        """Until so many tasks were handed to workers."""
        await until(lambda: len(self.workers.tasks) >= number)

    async def reached(self, job: Job, state: str) -> Job:
        await until(lambda: self.store.jobs.get(HERE, job.id).state == state)
        return self.store.jobs.get(HERE, job.id)


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.005)


def hand_in(store: Store, seed: int = 0, **further: Any) -> Job:
    example = measure_example()
    del example["cluster"]
    example["sample"]["seed"] = seed
    work = JobSpec.model_validate_json(
        json.dumps({"measure": example, "measure_digest": f"m{seed}"})
    )
    request = JobRequest(
        kind="profile", request_json=work.model_dump_json(exclude_unset=True), needs="cpu"
    )
    return store.jobs.submit(HERE, request.model_copy(update=further))


def kinds(store: Store, job: Job) -> list[str]:
    return [event.kind for event in store.jobs.events(HERE, job.id)]


@pytest.fixture
def play():
    """Run a scene with a server, and stop that afterwards."""

    def play(scene: Callable[[Server], Awaitable[None]], **retry_policy: Any) -> None:
        async def on_stage() -> None:
            store = Store(IN_MEMORY)
            server = Server(store, **retry_policy)
            await server.runner.start()
            try:
                await asyncio.wait_for(scene(server), 20)
            finally:
                await server.runner.stop()
                store.close()

        asyncio.run(on_stage())

    return play


def test_a_job_goes_its_way(play, found):
    async def scene(server: Server) -> None:
        job = hand_in(server.store)
        server.runner.take(job)
        await server.given()
        assert server.store.jobs.get(HERE, job.id).state == "queued", "nobody has begun it"
        server.workers.say(WorkerStarted("w7"), WorkerProgress(1, 2, "x"), Heartbeat(), found)
        done = await server.reached(job, "succeeded")
        assert (done.attempt, done.worker) == (1, "w7")
        assert kinds(server.store, job) == ["queued", "started", "progress", "succeeded"]

    play(scene)


def test_a_lost_worker_means_another_attempt_and_in_the_end_a_failure(play):
    async def scene(server: Server) -> None:
        job = hand_in(server.store)
        server.runner.take(job)
        for run in (1, 2):
            await server.given(run)
            server.workers.say(WorkerStarted("w"), WorkerLost("it was killed"))
        done = await server.reached(job, "failed")
        assert done.attempt == 2
        assert json.loads(done.outcome_json or "")["type"].endswith(":worker-lost")
        assert kinds(server.store, job).count("failed") == 1

    play(scene)


def test_a_worker_that_falls_silent_is_taken_for_dead_and_what_it_says_later_for_nothing(
    play, found, profile
):
    async def scene(server: Server) -> None:
        job = hand_in(server.store)
        server.runner.take(job)
        await server.given()
        server.workers.say(WorkerStarted("w1"))
        await server.given(2)
        assert server.workers.tasks[0][0].key in server.workers.stopped
        server.workers.say(WorkerStarted("w2"))
        await server.reached(job, "running")
        server.workers.say(replace(found), run=0)
        await asyncio.sleep(0.1)
        assert server.store.jobs.get(HERE, job.id).state == "running"
        server.workers.say(found, run=1)
        assert (await server.reached(job, "succeeded")).attempt == 2

    play(scene, silence_s=0.2)


def test_what_a_dead_server_left_is_taken_up_by_the_next(play, found):
    async def scene(server: Server) -> None:
        dead = server.store
        running, queued = hand_in(dead, seed=1), hand_in(dead, seed=2)
        started = dead.jobs.start(running.id, attempt=0, worker="gone")
        assert started is not None
        server.runner.take(queued)  # as a restart does; the running one may be alive
        await server.given(1)
        await asyncio.sleep(0.1)
        assert len(server.workers.tasks) == 1
        server.skew = timedelta(seconds=31)
        await server.given(2)
        for run in (0, 1):
            server.workers.say(WorkerStarted("w"), found, run=run)
        await server.reached(queued, "succeeded")
        assert (await server.reached(running, "succeeded")).attempt == 2
        assert dead.jobs.finish(running.id, 1, "failed") is None, "the dead one has no say"

    play(scene)


def test_a_restart_resubmits_what_is_queued(found):
    async def scene() -> None:
        store = Store(IN_MEMORY)
        jobs = [hand_in(store, seed=seed) for seed in range(3)]
        server = Server(store)
        server.workers.has = {"cpu": 3}
        await server.runner.start()
        await server.given(3)
        for run in range(3):
            server.workers.say(WorkerStarted("w"), found, run=run)
        for job in jobs:
            await server.reached(job, "succeeded")
        await server.runner.stop()
        store.close()

    asyncio.run(scene())


def test_what_cannot_be_read_fails_and_is_not_tried_for_ever(play, caplog):
    """The log had what was sent, which is the client's alone."""

    async def scene(server: Server) -> None:
        request = JobRequest(kind="profile", request_json='{"measure": "a secret name"}')
        job = server.store.jobs.submit(HERE, request)
        server.runner.take(job)
        ended = await server.reached(job, "failed")
        assert "cannot read the job's request" in (ended.outcome_json or "")

    play(scene)
    (said,) = (entry.message for entry in caplog.records if "cannot be read" in entry.message)
    assert said.endswith(": missing, model_type")
    assert "secret" not in caplog.text


def test_a_cancelled_job_of_a_dead_server_is_cancelled_not_started(play):
    async def scene(server: Server) -> None:
        job = hand_in(server.store)
        server.store.jobs.start(job.id, attempt=0, worker="gone")
        server.store.jobs.request_cancel(HERE, job.id)
        server.skew = timedelta(seconds=31)
        await server.reached(job, "cancelled")
        assert server.workers.tasks == []

    play(scene)


def test_a_server_that_stops_queues_again_what_runs(found):
    async def scene() -> None:
        store = Store(IN_MEMORY)
        first = Server(store)
        await first.runner.start()
        job = hand_in(store)
        first.runner.take(job)
        await first.given()
        first.workers.say(WorkerStarted("w"))
        await first.reached(job, "running")
        await first.runner.stop()
        assert store.jobs.get(HERE, job.id).state == "queued"
        assert first.workers.stopped == [first.workers.tasks[0][0].key]
        second = Server(store)
        await second.runner.start()
        await second.given()
        second.workers.say(WorkerStarted("w"), found)
        assert (await second.reached(job, "succeeded")).attempt == 2
        await second.runner.stop()
        store.close()

    asyncio.run(scene())


def test_of_two_servers_with_one_job_one_result_is_kept(found):
    async def scene() -> None:
        store = Store(IN_MEMORY)
        job = hand_in(store)
        servers = [Server(store), Server(store)]
        for server in servers:
            server.runner.take(job)
            await server.given()
        for server in servers:
            server.workers.say(WorkerStarted("w"), found)
        await servers[0].reached(job, "succeeded")
        await asyncio.sleep(0.1)
        assert kinds(store, job) == ["queued", "started", "succeeded"]
        for server in servers:
            await server.runner.stop()
        store.close()

    asyncio.run(scene())


def test_a_queued_job_fails_at_its_deadline_and_a_running_one_too(play):
    async def scene(server: Server) -> None:
        soon = utc_now() + timedelta(seconds=60)
        queued = hand_in(server.store, seed=1, deadline_at=soon)
        running = hand_in(server.store, seed=2, deadline_at=soon)
        for job in (queued, running):
            server.runner.take(job)
        await server.given(2)
        (run,) = (
            run
            for run, (task, _) in enumerate(server.workers.tasks)
            if task.key.startswith(running.id)
        )
        server.workers.say(WorkerStarted("w"), run=run)
        await server.reached(running, "running")
        server.skew = timedelta(seconds=61)
        for job in (queued, running):
            problem = json.loads((await server.reached(job, "failed")).outcome_json or "")
            assert problem["type"].endswith(":deadline-exceeded")
        await until(lambda: len(set(server.workers.stopped)) == 2)

    play(scene, silence_s=300.0)


def test_a_database_that_is_away_for_a_while_loses_nothing(play, found, monkeypatch):
    async def scene(server: Server) -> None:
        job = hand_in(server.store)
        server.runner.take(job)
        await server.given()
        calls = {"start": 0, "report": 0, "finish": 0}

        def failing_first(name: str) -> None:
            real = getattr(server.store.jobs, name)

            def call(*arguments: Any, **named: Any) -> Any:
                calls[name] += 1
                if calls[name] <= 3:
                    raise StoreUnavailable("gone")
                return real(*arguments, **named)

            monkeypatch.setattr(server.store.jobs, name, call)

        for name in calls:
            failing_first(name)
        server.workers.say(WorkerStarted("w"), WorkerProgress(1, 2, "x"), found)
        await server.reached(job, "succeeded")
        assert kinds(server.store, job) == ["queued", "started", "progress", "succeeded"]
        assert set(calls.values()) == {4}

    play(scene)


def test_workers_that_cannot_be_reached_are_waited_for(play, found):
    async def scene(server: Server) -> None:
        server.workers.is_gone = True
        job = hand_in(server.store)
        server.runner.take(job)
        await asyncio.sleep(0.1)
        assert server.runner.message(job) == "the scheduler does not answer"
        server.workers.is_gone = False
        await server.given()
        server.workers.say(WorkerStarted("w"), found)
        await server.reached(job, "succeeded")

    play(scene)


def test_a_cancel_on_another_server_is_seen(play):
    async def scene(server: Server) -> None:
        job = hand_in(server.store)
        server.runner.take(job)
        await server.given()
        server.workers.say(WorkerStarted("w"))
        await server.reached(job, "running")
        server.store.jobs.request_cancel(HERE, job.id)
        await server.reached(job, "cancelled")
        assert server.workers.stopped

    play(scene)


def test_a_cancelled_job_whose_worker_is_lost_is_cancelled(play):
    """Cause: it was queued again, could never be started, and never ended."""

    async def scene(server: Server) -> None:
        job = hand_in(server.store)
        server.runner.take(job)
        await server.given()
        server.workers.say(WorkerStarted("w"))
        await server.reached(job, "running")
        server.store.jobs.request_cancel(HERE, job.id)
        server.workers.say(WorkerLost("it was killed"))
        await server.reached(job, "cancelled")
        assert len(server.workers.tasks) == 1

    play(scene)


def test_half_a_character_and_no_profile_end_a_job_and_break_no_list(play):
    """Cause: one such name, and every list of the project's jobs was answered 500."""

    async def scene(server: Server) -> None:
        job, other = hand_in(server.store, seed=1), hand_in(server.store, seed=2)
        for each in (job, other):
            server.runner.take(each)
        await server.given(2)
        halves = TaskFailed(OutOfMemory("no \ud800", layer="\ud800").to_record())
        server.workers.say(WorkerStarted("w"), WorkerProgress(1, 2, "\ud800"), halves, run=0)
        server.workers.say(WorkerStarted("w"), ProfileMeasured("{}"), run=1)
        for each in (job, other):
            problem = (await server.reached(each, "failed")).outcome_json or ""
            assert problem.encode()
        (progress,) = server.store.jobs.latest([job.id, other.id], "progress").values()
        assert json.loads(progress)["layer"] == "?"

    play(scene)


def test_many_jobs_that_wait_for_a_scheduler_ask_for_it_one_after_the_other(play):
    """Cause: each had a thread wait for it, until no request had one left."""

    async def scene(server: Server) -> None:
        asking, most = 0, 0

        def offers() -> Mapping[str, int]:
            nonlocal asking, most
            asking += 1
            most = max(most, asking)
            time.sleep(0.05)
            asking -= 1
            raise WorkersUnavailable("away")

        server.workers.offers = offers  # type: ignore[method-assign]
        jobs = [hand_in(server.store, seed=seed) for seed in range(60)]
        for job in jobs:
            server.runner.take(job)
        await until(lambda: server.runner.message(jobs[0]) == "away")
        await asyncio.sleep(0.2)
        assert most == 1
        assert server.workers.tasks == []

    play(scene)


def test_one_fault_does_not_end_all_looking(play, found, monkeypatch):
    """Cause: after one error nothing was taken up any more, and nothing said so."""

    async def scene(server: Server) -> None:
        real, faults = server.store.jobs.unfinished, iter((RuntimeError("a row"), OSError("x")))

        def unfinished() -> Any:
            for fault in faults:
                raise fault
            return real()

        monkeypatch.setattr(server.store.jobs, "unfinished", unfinished)
        await asyncio.sleep(0.1)
        job = hand_in(server.store)
        server.store.jobs.start(job.id, attempt=0, worker="gone")
        server.skew = timedelta(seconds=31)
        await server.given()
        server.workers.say(WorkerStarted("w"), found)
        await server.reached(job, "succeeded")

    play(scene)


def test_what_is_known_waits_for_no_worker(play, profile):
    async def scene(server: Server) -> None:
        server.workers.is_gone = True
        stored = server.store.documents.put(HERE, Profile.model_validate(profile))
        server.store.reuse.remember(HERE, "profile", "m0", stored.id)
        job = hand_in(server.store)
        server.runner.take(job)
        assert (await server.reached(job, "succeeded")).result_id == stored.id

    play(scene)


def test_projects_take_turns_at_the_workers_and_waiting_jobs_read_no_rows(play, monkeypatch):
    """A queue of 50 read 50 rows every 5 s, and another project's job came after all of them."""
    reads: list[str] = []

    async def scene(server: Server) -> None:
        other = server.store.projects.create("other").id
        many = [hand_in(server.store, seed=number) for number in range(12)]
        for job in many:
            server.runner.take(job)
        await server.given(2)
        late = JobRequest(
            kind="profile",
            request_json=server.store.jobs.request_json(many[0].id),
            needs="cpu",
        )
        theirs = server.store.jobs.submit(other, late)
        server.runner.take(theirs)
        get = server.store.jobs.get

        def count(project: str, job_id: str) -> Job:
            reads.append(job_id)
            return get(project, job_id)

        await asyncio.sleep(0.3)
        assert len(server.workers.tasks) == 2, "one worker, and one job more"
        monkeypatch.setattr(server.store.jobs, "get", count)
        await asyncio.sleep(0.3)
        assert len(set(reads)) <= 2, "only those given to workers are looked after one by one"
        monkeypatch.setattr(server.store.jobs, "get", get)
        for run in range(3):
            failed = TaskFailed(MeasurementError("no").to_record())
            server.workers.say(WorkerStarted("w"), failed, run=run)
            await server.given(run + 3)
        keys = [task.key for task, _ in server.workers.tasks]
        assert any(key.startswith(theirs.id) for key in keys[2:4]), "after one more of the first"

    play(scene)


def test_resources_that_no_job_needs_any_more_are_forgotten(play):
    """Every name of a resource that a client made up left an entry."""

    async def scene(server: Server) -> None:
        server.runner._turns_for("nobody's")
        assert list(server.runner._turns) == []
        held = server.runner._turns_for("cpu")
        async with held.place(HERE):
            assert server.runner._turns_for("cpu") is held

    play(scene)


def test_more_workers_get_more_jobs(play, monkeypatch):
    async def scene(server: Server) -> None:
        for number in range(6):
            server.runner.take(hand_in(server.store, seed=number))
        await server.given(2)
        server.workers.has = {"cpu": 4}
        await server.given(5)
        await asyncio.sleep(0.1)
        assert len(server.workers.tasks) == 5

    play(scene)
