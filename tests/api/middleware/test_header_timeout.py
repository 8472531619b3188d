"""Connections that say nothing, or their headers a byte at a time, are closed; others are not."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import uvicorn

from stagewright.api.middleware import header_timeout
from stagewright.api.middleware.header_timeout import HeaderTimeoutProtocol

GIVEN_S = 0.3
REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def app(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    await asyncio.sleep(2 * GIVEN_S if scope["path"] == "/slow" else 0)
    await send({"type": "http.response.start", "status": 200,
                "headers": [(b"content-length", b"4")]})  # fmt: skip
    await send({"type": "http.response.body", "body": b"done"})


@contextlib.asynccontextmanager
async def listening():
    config = uvicorn.Config(app, http=HeaderTimeoutProtocol, ws="none", log_config=None, port=0)
    server = uvicorn.Server(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        await server.shutdown()


async def said(*pieces: bytes, pause_s: float = 0.0) -> bytes:
    """What comes back until the connection is closed, of pieces sent one after the other."""
    async with listening() as port, asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(pause_s)
        answer = await reader.read()
        writer.close()
        return answer


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(header_timeout, "HEADERS_WITHIN_S", GIVEN_S)


@pytest.mark.parametrize(
    ("pieces", "answer"),
    [
        ([], b""),
        ([b"GET / HTTP/1.1\r\nHost: local"], b"HTTP/1.1 408 "),
        ([bytes([byte]) for byte in REQUEST[:8]], b"HTTP/1.1 408 "),
    ],
    ids=["nothing", "half a header", "a byte at a time"],
)
def test_a_head_that_does_not_come_is_not_waited_for(pieces, answer):
    assert asyncio.run(said(*pieces, pause_s=0.005)).startswith(answer)
    if not answer:
        assert asyncio.run(said()) == b""


def test_a_second_request_is_waited_for_no_longer():
    answer = asyncio.run(said(REQUEST, b"GET / HTTP/1.1\r\nHost:", pause_s=0.05))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 408 " in answer


def test_an_answer_or_a_body_that_takes_longer_is_waited_for():
    close = b"Connection: close\r\n\r\n"
    slow = asyncio.run(said(b"GET /slow HTTP/1.1\r\nHost: localhost\r\n" + close))
    assert slow.startswith(b"HTTP/1.1 200 ")
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n" + close
    assert asyncio.run(said(head, b"a", b"b", pause_s=GIVEN_S)).startswith(b"HTTP/1.1 200 ")
