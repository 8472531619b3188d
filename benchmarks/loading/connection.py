"""HTTP/1.1 on one connection that stays open, as little as this service needs.

A library's client costs more processor time than the service takes for many a request, and both
share the machine.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """Response of the service; header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


class Connection:
    """Sends requests one after the other.

    Args:
        host: Where the server listens.
        port: And on which port.
        token: For every request.
    """

    def __init__(self, host: str, port: int, token: str) -> None:
        self._host, self._port = host, port
        self._common = f"Host: {host}:{port}\r\nAuthorization: Bearer {token}\r\n"
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(
        self, method: str, path: str, body: bytes | None = None, headers: str = ""
    ) -> Answer:
        """One request and its answer.

        Raises:
            OSError, EOFError: The server closed the connection, or does not answer.
        """
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port)
        reader, writer = self._streams
        if body is not None:
            headers += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        writer.write(f"{method} {path} HTTP/1.1\r\n{self._common}{headers}\r\n".encode())
        if body is not None:
            writer.write(body)
        start, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        found = dict(_header(line) for line in lines if line)
        status = int(start.split(" ", 2)[1])
        length = int(found.get("content-length", "0"))
        content = await reader.readexactly(length) if length else b""
        if found.get("connection") == "close":
            self.close()
        return Answer(status, found, content)

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def _header(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.lower(), value.strip()
