"""Bytes on the wire that no HTTP library would send."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from .attack import REFUSED, Attack, Reply, Target

ANSWERED_WITHIN_S = 10.0
SAYS_WITHIN_S = 0.5
CLOSES_WITHIN_S = 5.0
QUIET_S = 0.1
CLOSED = 0
HUNG = 598
"""A status that no attack allows: neither answered nor closed in time."""

_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})[^\r\n]*\r\n")


def attacks() -> Iterator[Attack]:
    yield from _hosts()
    yield from _framing()
    yield from _lines()
    yield from _headers()
    yield from _slow()


def exchange(target: Target, raw: bytes) -> Reply:
    """Return what a server says to raw bytes until it closes, or has nothing more to say."""
    with socket.create_connection((target.host, target.port), timeout=ANSWERED_WITHIN_S) as line:
        with suppress(OSError):  # it has answered and closed already
            line.sendall(raw)
        return _read(line)


def _read(line: socket.socket) -> Reply:
    """Return the worst of its answers: bytes that were smuggled in get one of their own."""
    said, is_closed = b"", False
    for wait_s in (SAYS_WITHIN_S, CLOSES_WITHIN_S):
        line.settimeout(wait_s)
        with suppress(OSError):
            while piece := line.recv(65536):
                said += piece
                line.settimeout(QUIET_S)
            is_closed = True
        if said:
            break
        with suppress(OSError):  # it waits for more, and there is none
            line.shutdown(socket.SHUT_WR)
    if not (said or is_closed):
        return Reply(HUNG, body=b"neither answered nor closed")
    statuses = [int(status) for status in _STATUS.findall(said)]
    worst = max(statuses, key=lambda status: status not in REFUSED, default=CLOSED)
    head, _, body = said.partition(b"\r\n\r\n")
    kind = re.search(rb"(?i)\r\ncontent-type: ([^\r\n]*)", head)
    return Reply(worst, kind[1].decode("latin-1") if kind else "", body)


def _raw(group: str, name: str, head: str, body: bytes = b"", words: str = "") -> Attack:
    """Return an attack with HOST and TOKEN filled in; refused, or closed without a word."""

    def send(target: Target) -> Reply:
        filled = head.replace("HOST", f"{target.host}:{target.port}")
        filled = filled.replace("TOKEN", f"Authorization: Bearer {target.token}")
        return exchange(target, filled.encode("latin-1") + body)

    return Attack(group, name, send, frozenset({CLOSED, *REFUSED}), words, is_plain=True)


def _hosts() -> Iterator[Attack]:
    for name, host in {
        "another name": "Host: evil.example",
        "a rebinding name": "Host: 127.0.0.1.evil.example",
        "none": "X: y",
        "two": "Host: HOST\r\nHost: evil.example",
        "two alike": "Host: HOST\r\nHost: HOST",
        "a list": "Host: HOST, evil.example",
        "user info": "Host: 127.0.0.1@evil.example",
        "a path": "Host: 127.0.0.1/x",
        "brackets": "Host: [::ffff:127.0.0.1",
        "an empty one": "Host:",
        "a homoglyph": "Host: loc\xe0lhost",
    }.items():
        yield _raw("host", name, f"GET /v1/plans HTTP/1.1\r\n{host}\r\nTOKEN\r\n\r\n")
    for name, origin in {
        "foreign": "http://evil.example",
        "null": "null",
        "two": "http://HOST\r\nOrigin: x",
    }.items():
        head = f"GET /v1/plans HTTP/1.1\r\nHost: HOST\r\nTOKEN\r\nOrigin: {origin}\r\n\r\n"
        yield _raw("host", f"origin: {name}", head)


def _framing() -> Iterator[Attack]:
    smuggled = b"GET /v1/api-keys HTTP/1.1\r\nHost: x\r\n\r\n"
    hidden, chunked = b"0\r\n\r\n" + smuggled, "Transfer-Encoding: chunked"
    start = "POST /v1/plans HTTP/1.1\r\nHost: HOST\r\nTOKEN\r\nContent-Type: application/json\r\n"
    for name, lengths, body in (
        ("two lengths", "Content-Length: 2\r\nContent-Length: 44", b"{}" + smuggled),
        ("two equal lengths", "Content-Length: 2\r\nContent-Length: 2", b"{}"),
        ("a list of lengths", "Content-Length: 2, 44", b"{}" + smuggled),
        ("a length and chunks", f"Content-Length: {5 + len(smuggled)}\r\n{chunked}", hidden),
        ("chunks and a length", f"{chunked}\r\nContent-Length: 4", hidden),
        ("chunks twice", "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity", b"0\r\n\r\n"),
        ("xchunked", "Transfer-Encoding: xchunked", b"0\r\n\r\n"),
        ("gzip, chunked", "Transfer-Encoding: gzip, chunked", b"0\r\n\r\n"),
        ("a blank before the colon", "Transfer-Encoding : chunked", hidden),
        ("a folded header", "Transfer-Encoding:\r\n chunked\r\nContent-Length: 2", hidden),
        ("a negative length", "Content-Length: -1", b"{}"),
        ("a signed length", "Content-Length: +2", b"{}"),
        ("a hexadecimal length", "Content-Length: 0x2", b"{}"),
        ("a huge length", "Content-Length: 99999999999999999999999", b"{}"),
        ("a length that is not kept", "Content-Length: 100", b"{}"),
        ("a huge chunk", "Transfer-Encoding: chunked", b"FFFFFFFFFFFFFFFFF\r\n{}"),
        ("a negative chunk", "Transfer-Encoding: chunked", b"-1\r\n{}"),
        ("a chunk cut off", "Transfer-Encoding: chunked", b"10\r\n{}"),
        ("trailers", "Transfer-Encoding: chunked", b"2\r\n{}\r\n0\r\nHost: evil\r\n\r\n"),
    ):  # fmt: skip
        yield _raw("framing", name, f"{start}{lengths}\r\n\r\n", body)


def _lines() -> Iterator[Attack]:
    rest = "Host: HOST\r\nTOKEN\r\n\r\n"
    for name, line in {
        "an address as target": "GET http://evil.example/v1/plans HTTP/1.1",
        "its own address": "GET http://127.0.0.1/v1/plans HTTP/1.1",
        "an authority": "CONNECT evil.example:443 HTTP/1.1",
        "an asterisk": "OPTIONS * HTTP/1.1",
        "no slash": "GET v1/plans HTTP/1.1",
        "a file": "GET file:/etc/passwd HTTP/1.1",
        "HTTP/0.9": "GET /v1/plans",
        "HTTP/3.0": "GET /v1/plans HTTP/3.0",
        "a method of its own": "PWN /v1/plans HTTP/1.1",
        "TRACE": "TRACE /v1/plans HTTP/1.1",
        "two blanks": "GET  /v1/plans  HTTP/1.1",
        "a NUL": "GET /v1/\0plans HTTP/1.1",
        "bytes": "GET /v1/\xff\xfe HTTP/1.1",
        "64 KiB": "GET /v1/plans?x=" + "x" * 65536 + " HTTP/1.1",
        "HTTP/2": "PRI * HTTP/2.0",
        "TLS": "\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03",
    }.items():
        yield _raw("line", name, f"{line}\r\n{rest}")


def _headers() -> Iterator[Attack]:
    start = "GET /v1/plans/none HTTP/1.1\r\nHost: HOST\r\nTOKEN\r\n"
    for name, headers in {
        "1 MiB": "X: " + "x" * 2**20,
        "10,000 of them": "\r\n".join(f"X-{index}: y" for index in range(10_000)),
        "a NUL": "X: a\0b",
        "a bare line feed": "X: a\nAuthorization: Bearer evil",
        "a bare return": "X: a\rY: b",
        "a blank in a name": "X Y: z",
        "no colon": "nonsense",
        "two tokens": "Authorization: Bearer evil",
        "a token of another sort": "Authorization: Basic YTpi",
    }.items():
        yield _raw("header", name, f"{start}{headers}\r\n\r\n")
    for name, value in {
        "a line break": "a\r\n b", "1,000 characters": "x" * 1000, "not ASCII": "\xe9\xff",
    }.items():  # fmt: skip
        head = (
            "POST /v1/plans HTTP/1.1\r\nHost: HOST\r\nTOKEN\r\nContent-Type: application/json\r\n"
            f"Idempotency-Key: {value}\r\nContent-Length: 2\r\n\r\n"
        )
        yield _raw("header", f"idempotency key: {name}", head, b"{}")
    upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    key = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="
    yield _raw("header", "an upgrade to a websocket", f"{start}{upgrade}{key}\r\n\r\n")


def _slow() -> Iterator[Attack]:
    """Others are answered meanwhile; the slow one is never answered with anything but a 4xx."""

    def dripping(pieces: Callable[[Target], list[bytes]]) -> Callable[[Target], Reply]:
        def send(target: Target) -> Reply:
            lines = [
                socket.create_connection((target.host, target.port), timeout=ANSWERED_WITHIN_S)
                for _ in range(100)
            ]
            try:
                for piece in pieces(target):
                    for line in lines:
                        line.sendall(piece)
                    time.sleep(0.05)
                begin = time.monotonic()
                other = target.ask("GET", "/v1/plans?limit=1")
                took_s = time.monotonic() - begin
                if other.status != 200 or took_s > 3:
                    return Reply(
                        599, body=f"others wait {took_s:.1f} s for a {other.status}".encode()
                    )
                lines[0].shutdown(socket.SHUT_WR)
                return _read(lines[0])
            finally:
                for line in lines:
                    line.close()

        return send

    def head(target: Target, length: int) -> bytes:
        return (
            f"POST /v1/plans HTTP/1.1\r\nHost: {target.host}\r\n"
            f"Authorization: Bearer {target.token}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {length}\r\n"
        ).encode()

    allowed = frozenset({CLOSED, *REFUSED})
    yield Attack(
        "slow", "100 heads, a line at a time",
        dripping(lambda target: [*head(target, 9).splitlines(keepends=True), b"X: "]),
        allowed, is_plain=True,
    )  # fmt: skip
    yield Attack(
        "slow", "100 bodies, a byte at a time",
        dripping(lambda target: [head(target, 1000) + b"\r\n", *[b" "] * 5]),
        allowed, is_plain=True,
    )  # fmt: skip
