"""A connection has to say what it wants in time: uvicorn waits for a request's head for ever."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_WITHIN_S = 20.0
"""For the first byte of a connection, and from there for its last header."""

TOO_SLOW = (
    b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-type: text/plain\r\n"
    b"content-length: 33\r\n\r\nthe request's head took too long\n"
)


class HeaderTimeoutProtocol(H11Protocol):
    """Closes connections whose request line and headers are not there after `HEAD_WITHIN_S`.

    One timer for each connection, and for each later request whose head comes in pieces: what an
    ordinary client sends costs nothing. How long a body takes is `limits.BodyLimit`'s to see to.
    """

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._late is None:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._late = self.loop.call_later(HEAD_WITHIN_S, self._give_up)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        self._late = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            if self.conn.trailing_data[0]:
                self.transport.write(TOO_SLOW)
            self.transport.close()
