"""Measurements by way of a live service, over connections that break."""

from __future__ import annotations

import asyncio
import copy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest

from stagewright import AsyncClient, Client, Profile
from stagewright.api.http.examples import example_profile, measure_example
from stagewright.client.methods import plans
from stagewright.core.errors import Cancelled, DeadlineExceeded, InvalidInput, NotFound
from stagewright.core.service.jobs import JobEvent
from tests.api.job_children import measuring
from tests.live_service import TOKEN, live_service

MODEL, SAMPLE = measure_example()["model"], measure_example()["sample"]
PROFILE = Profile.model_validate(example_profile())


def child(program: str) -> tuple[str, ...]:
    return (sys.executable, "-c", program)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A service whose measuring child is a stand-in that takes a moment over three layers."""
    with live_service(measure_command=child(measuring(example_profile(), seconds=0.6))) as url:
        yield url


def test_a_measured_plan_waits_for_its_job_and_tells_how_far_it_is(client, monkeypatch):
    monkeypatch.setattr(plans, "PROMPT_S", 0)
    seen: list[JobEvent] = []
    made = client.plan(
        MODEL, SAMPLE, cluster="2x24GB", profiling={"budget_s": 1}, progress=seen.append
    )
    assert made.require() == client.plan(PROFILE, cluster="2x24GB").require()
    assert [event.number for event in seen] == list(range(1, len(seen) + 1))
    kinds = [event.kind for event in seen]
    assert (kinds[0], kinds[-1]) == ("queued", "succeeded")
    assert "progress" in kinds


def test_a_profile_job_is_waited_for_and_known_the_next_time(client):
    profiling = {"budget_s": 2}
    job = client.profile_job(MODEL, SAMPLE, profiling=profiling)
    assert not job.is_finished
    done = client.wait(job)
    assert client.get_profile(done.result.id).profile == PROFILE
    again = client.profile_job(MODEL, SAMPLE, profiling=profiling)
    assert (again.state, again.result) == ("succeeded", done.result)
    assert client.job(job.id) == done
    assert job.id in [entry.id for entry in client.jobs(state="succeeded").jobs]


def test_cancelling_ends_the_wait_and_a_limit_ends_it_sooner(client):
    job = client.profile_job(MODEL, SAMPLE, profiling={"budget_s": 3})
    with pytest.raises(DeadlineExceeded, match="still running"):
        client.wait(job, timeout_s=0.05)
    client.cancel(job)
    with pytest.raises(Cancelled, match=job.id):
        client.wait(job)
    with pytest.raises(NotFound):
        client.wait("job_none")


class Cutting(httpx2.BaseTransport):
    """Hands requests on; cuts every stream after its first piece, and notes what was asked."""

    def __init__(self) -> None:
        self.inner = httpx2.HTTPTransport()
        self.resumed: list[str | None] = []

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        response = self.inner.handle_request(request)
        if not request.url.path.endswith("/events"):
            return response
        self.resumed.append(request.headers.get("last-event-id"))
        assert len(self.resumed) < 50, "it gets nowhere"
        return httpx2.Response(
            response.status_code, headers=response.headers, stream=FirstPiece(response.stream)
        )

    def close(self) -> None:
        self.inner.close()


class FirstPiece(httpx2.SyncByteStream):
    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __iter__(self) -> Iterator[bytes]:
        yield next(iter(self.stream))
        raise httpx2.ReadError("cut")

    def close(self) -> None:
        self.stream.close()


def test_events_over_a_connection_that_is_cut_again_and_again(server, client, monkeypatch):
    monkeypatch.setattr("stagewright.client.client.time.sleep", lambda seconds: None)
    whole = client.profile_job(MODEL, SAMPLE, profiling={"budget_s": 4})
    transport = Cutting()
    with Client(server, TOKEN, transport=transport) as cut:
        found = list(cut.events(whole))
    assert found == list(client.events(whole))
    numbers = [event.number for event in found]
    assert numbers == list(range(1, len(found) + 1))
    assert transport.resumed[0] is None
    assert len(transport.resumed) > 2
    assert all(int(number or 0) in numbers for number in transport.resumed[1:])
    assert list(client.events(whole, after=2)) == found[2:]


def test_the_asynchronous_client_watches_several_at_once(server):
    async def watch_all() -> list[list[str]]:
        async with AsyncClient(server, TOKEN) as client:
            jobs = [
                await client.profile_job(MODEL, SAMPLE, profiling={"budget_s": budget})
                for budget in (5, 6)
            ]

            async def kinds(job: Any) -> list[str]:
                return [event.kind async for event in client.events(job)]

            found = await asyncio.gather(*map(kinds, jobs))
            await asyncio.gather(*(client.wait(job) for job in jobs))
            return list(found)

    for kinds in asyncio.run(watch_all()):
        assert (kinds[0], kinds[-1]) == ("queued", "succeeded")


def losing(answers: list[Any]) -> tuple[Callable[[httpx2.Request], httpx2.Response], list[str]]:
    """A handler that gives answers or raises them; and the keys of what was sent."""
    keys: list[str] = []

    def handle(request: httpx2.Request) -> httpx2.Response:
        keys.append(request.headers.get("idempotency-key", ""))
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return handle, keys


def stored() -> httpx2.Response:
    return httpx2.Response(201, json={"id": "profile_1", "created_at": "2025-01-01T00:00:00Z"})


def test_what_is_sent_again_has_the_key_of_the_first_time(monkeypatch):
    monkeypatch.setattr("stagewright.client.client.time.sleep", lambda seconds: None)
    lost = [httpx2.ReadError("reset"), httpx2.ReadTimeout("slow"), httpx2.Response(503)]
    handle, keys = losing([*lost, stored(), stored()])
    with Client("http://test", transport=httpx2.MockTransport(handle)) as client:
        client.put_profile(PROFILE)
        client.put_profile(PROFILE)
    assert len(keys) == 5
    assert len(set(keys[:4])) == 1
    assert keys[0] not in ("", keys[4])

    handle, keys = losing([httpx2.ReadError("reset"), stored()])

    async def put() -> None:
        async with AsyncClient("http://test", transport=httpx2.MockTransport(handle)) as client:
            await client.put_profile(PROFILE)

    asyncio.run(put())
    assert len(keys) == 2
    assert len(set(keys) - {""}) == 1


def test_the_service_s_own_words_point_at_the_field(client):
    broken = copy.deepcopy(example_profile())
    broken["layers"][1]["forward"]["median_s"] = -1.0
    with pytest.raises(InvalidInput, match="/layers/1/forward/median_s") as refused:
        client.put_profile(broken)
    assert refused.value.field == "/layers/1/forward/median_s"
    with pytest.raises(InvalidInput) as refused:
        client.plan(PROFILE, cluster="2x24GB", options={"num_microbatches": 0})
    assert refused.value.field == "/options/num_microbatches"
