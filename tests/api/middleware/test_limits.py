"""The body limit counts bytes as they come."""

from __future__ import annotations

import asyncio
import json

import pytest

from stagewright.api.auth.access import Principal
from stagewright.api.middleware.load_limits import LoadLimits
from stagewright.api.settings.settings import ServerSettings

JSON = {"Content-Type": "application/json"}


def test_the_limit_is_sixteen_mebibytes():
    assert ServerSettings(token="x").max_body_bytes == 16 * 2**20


def test_exactly_the_limit_is_read_and_one_byte_more_is_not(make_client, profile):
    body = json.dumps(profile).encode()
    assert (
        make_client(max_body_bytes=len(body))
        .post("/v1/profiles", content=body, headers=JSON)
        .is_success
    )
    response = make_client(max_body_bytes=len(body) - 1).post(
        "/v1/profiles", content=body, headers=JSON
    )
    assert response.status_code == 413
    assert str(len(body) - 1) in response.json()["detail"]
    assert response.headers["Content-Type"] == "application/problem+json"


@pytest.mark.parametrize("kind", ["application/octet-stream", "application/zip; x=y"])
def test_an_exported_program_that_is_too_long_is_told_to_be_captured(make_client, kind):
    client = make_client(max_body_bytes=1000)
    answer = client.post("/v1/graphs", content=b"x" * 1001, headers={"Content-Type": kind})
    assert answer.status_code == 413
    detail = answer.json()["detail"]
    assert "stagewright capture model.pt2 -o graph.json" in detail
    assert "(1000 bytes); this one has" in detail
    as_json = client.post("/v1/graphs", content=b"x" * 1001, headers=JSON)
    assert "capture" not in as_json.json()["detail"]


class Inner:
    """An application that remembers the bodies it was given."""

    def __init__(self):
        self.bodies = []

    async def __call__(self, scope, receive, send):
        self.bodies.append((await receive())["body"])


@pytest.mark.parametrize(
    "headers", [[], [(b"content-length", b"1")], [(b"content-length", b"nonsense")]]
)
def test_a_long_stream_is_cut_off_whatever_its_header_says(headers):
    taken, sent, inner = [], [], Inner()

    async def receive():
        assert len(taken) < 20, "it reads on"
        taken.append(1)
        return {"type": "http.request", "body": b"x" * 10, "more_body": True}

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": "/v1/plans", "headers": headers}
    asyncio.run(LoadLimits(inner, 95, max_discarded_bytes=40)(scope, receive, send))
    assert len(taken) == 14, "95 bytes are accepted and 40 more are thrown away"
    assert sent[0]["status"] == 413
    assert inner.bodies == []


def test_a_body_that_is_too_long_is_read_to_its_end_before_the_refusal():
    """Cause: answering earlier resets the connection of clients that send first, listen later."""
    pieces, sent, inner = [b"x" * 10] * 12, [], Inner()

    async def receive():
        return {"type": "http.request", "body": pieces.pop(), "more_body": bool(pieces)}

    async def send(message):
        assert not pieces, "it answered before it had read"
        sent.append(message)

    for headers in ([], [(b"content-length", b"120")]):
        pieces[:] = [b"x" * 10] * 12
        scope = {"type": "http", "path": "/v1/plans", "headers": headers}
        asyncio.run(LoadLimits(inner, 95, max_discarded_bytes=40)(scope, receive, send))
    assert [message["status"] for message in sent[::2]] == [413, 413]
    assert inner.bodies == []


@pytest.mark.parametrize(
    "headers",
    [[(b"content-length", b"136")], [(b"content-length", b"96"), (b"expect", b"100-continue")]],
    ids=["longer than is thrown away", "a client that asks first"],
)
def test_an_honest_header_is_refused_before_a_byte_is_read(headers):
    sent = []

    async def receive():
        raise AssertionError("the body was read")

    async def send(message):
        sent.append(message)

    limit = LoadLimits(Inner(), 95, max_discarded_bytes=40)
    asyncio.run(limit({"type": "http", "path": "/v1/plans", "headers": headers}, receive, send))
    assert sent[0]["status"] == 413


def test_pieces_arrive_as_one_body():
    pieces, inner = [b"one ", b"two ", b"three"], Inner()

    async def receive():
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    asyncio.run(
        LoadLimits(inner, 95)({"type": "http", "path": "/v1/plans", "headers": []}, receive, None)
    )
    assert inner.bodies == [b"one two three"]


def test_a_client_that_leaves_is_let_go():
    inner = Inner()

    async def receive():
        return {"type": "http.disconnect"}

    asyncio.run(
        LoadLimits(inner, 95)({"type": "http", "path": "/v1/plans", "headers": []}, receive, None)
    )
    assert inner.bodies == []


MIB = 2**20


class Uploads:
    """Clients that send some mebibytes of a body and then nothing more."""

    def __init__(self, limit):
        self.limit, self.sent, self.tasks = limit, [], []

    async def begin(self, key, mebibytes, project="default"):
        pieces, sent = [b"x" * MIB] * mebibytes, []
        self.sent.append(sent)

        async def receive():
            if pieces:
                return {"type": "http.request", "body": pieces.pop(), "more_body": True}
            await asyncio.Event().wait()

        async def send(message):
            sent.append(message)

        state = {"principal": Principal(id=key, project_id=project)}
        scope = {"type": "http", "path": "/v1/profiles", "headers": [], "state": state}
        self.tasks.append(asyncio.create_task(self.limit(scope, receive, send)))
        for _ in range(50):
            await asyncio.sleep(0)

    @property
    def num_refused(self):
        return sum(bool(sent) for sent in self.sent)

    def end(self):
        for task in self.tasks:
            task.cancel()


def test_unfinished_uploads_are_bounded_for_a_key_and_in_all():
    """Forty unfinished uploads of 15 MB held 600 MB."""

    async def main():
        uploads = Uploads(LoadLimits(Inner(), 16 * MIB))
        for _ in range(10):
            await uploads.begin("key_1", 15)
        assert uploads.num_refused == 6, "64 MiB are four of 15"
        headers = dict(uploads.sent[-1][0]["headers"])
        assert uploads.sent[-1][0]["status"] == 429
        assert headers[b"retry-after"] == b"10"
        await uploads.begin("key_2", 15)
        assert uploads.num_refused == 6, "another key is not refused"
        for number in range(30):
            await uploads.begin(f"key_{3 + number}", 15, project=f"project_{number}")
        assert 41 - uploads.num_refused == 256 // 15
        uploads.tasks[0].cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await uploads.begin("key_1", 15)
        assert not uploads.sent[-1], "what was given up makes room"
        uploads.end()
        await asyncio.gather(*uploads.tasks, return_exceptions=True)
        assert uploads.limit._bodies.has_room("key_1", "default", 64 * MIB)

    asyncio.run(main())


def test_a_project_with_many_keys_leaves_room_for_uploads_of_another():
    """Four keys of one project could hold four unfinished uploads each, and all there was."""

    async def main():
        uploads = Uploads(LoadLimits(Inner(), 16 * MIB))
        for number in range(20):
            await uploads.begin(f"key_{number % 5}", 15, project="greedy")
        assert 20 - uploads.num_refused == 128 // 15
        assert "128.0 MiB of one project" in uploads.sent[-1][1]["body"].decode()
        await uploads.begin("key_of_another", 15, project="modest")
        assert not uploads.sent[-1]
        uploads.end()
        await asyncio.gather(*uploads.tasks, return_exceptions=True)

    asyncio.run(main())
