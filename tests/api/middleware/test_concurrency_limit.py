"""Requests that are answered at once, and those that wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stagewright.api.middleware.load_limits import ConcurrencyLimit, LoadLimits

STEPS = 8


def limited(app: ASGIApp, at_once: int, max_slot_s: float = 60.0) -> LoadLimits:
    return LoadLimits(app, 100, concurrency=ConcurrencyLimit(at_once, max_slot_s))


async def receive() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


async def ask(limit: LoadLimits, name: str, path: str = "/v1/plans") -> None:
    async def send(message: Message) -> None:
        raise AssertionError("nothing is sent here")

    await limit({"type": "http", "path": path, "name": name, "headers": []}, receive, send)


def answering(steps: Callable[[str], Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await steps(scope["name"])

    return app


def test_many_steps_wait_once_as_one_does() -> None:
    """Cause: under load a new plan took eight times as long as a list."""
    ended: list[str] = []

    async def steps(name: str) -> None:
        for _ in range(STEPS if name == "long" else 1):
            await asyncio.sleep(0)
        ended.append(name)

    async def main() -> None:
        limit = limited(answering(steps), 1)
        names = ["short 1", "long", "short 2", "short 3"]
        await asyncio.gather(*(ask(limit, name) for name in names))
        assert ended == names

    asyncio.run(main())


def test_so_many_are_answered_at_once() -> None:
    most = now = 0

    async def steps(name: str) -> None:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1

    async def main() -> None:
        limit = limited(answering(steps), 3)
        await asyncio.gather(*(ask(limit, str(number)) for number in range(20)))

    asyncio.run(main())
    assert most == 3


def test_what_takes_long_lets_others_pass_and_counts_once() -> None:
    """Two wait for something else; a third is answered, and no slot is released twice."""

    async def main() -> None:
        goes_on = asyncio.Event()

        async def steps(name: str) -> None:
            if name == "waits":
                await goes_on.wait()

        limit = limited(answering(steps), 1, 0.01)
        long = [asyncio.create_task(ask(limit, "waits")) for _ in range(2)]
        await asyncio.wait_for(ask(limit, "short"), 10)
        goes_on.set()
        await asyncio.gather(*long)
        assert limit._concurrency._free._value == 1

    asyncio.run(main())


def test_a_stream_releases_its_slot_when_it_begins() -> None:
    """Cause: two hundred idle streams opened at once kept a request waiting for four seconds."""

    async def main() -> None:
        opened, sent = asyncio.Event(), []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["name"] == "stream":
                headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                opened.set()
                await asyncio.Event().wait()

        async def send(message: Message) -> None:
            sent.append(message["type"])

        limit = limited(app, 1)
        scope = {"type": "http", "path": "/v1/jobs/job_1/events", "name": "stream", "headers": []}
        stream = asyncio.create_task(limit(scope, receive, send))
        await asyncio.wait_for(opened.wait(), 10)
        await asyncio.wait_for(ask(limit, "short"), 10)
        assert sent == ["http.response.start"]
        stream.cancel()

    asyncio.run(main())


def test_a_failure_releases_its_slot_and_probes_need_none() -> None:
    async def main() -> None:
        async def steps(name: str) -> None:
            if name == "fails":
                raise ZeroDivisionError
            if name == "holds":
                await asyncio.Event().wait()

        limit = limited(answering(steps), 1)
        for _ in range(2):
            try:
                await asyncio.wait_for(ask(limit, "fails"), 10)
            except ZeroDivisionError:
                continue
            raise AssertionError("it failed unseen")
        holds = asyncio.create_task(ask(limit, "holds"))
        await asyncio.sleep(0)
        await asyncio.wait_for(ask(limit, "probe", "/healthz"), 10)
        holds.cancel()

    asyncio.run(main())
