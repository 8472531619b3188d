"""Header timeout: uvicorn itself waits forever for a request's line and headers."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_WITHIN_S = 20.0
"""From a connection's start, or a later request's first byte, to the end of its headers."""

TIMEOUT_RESPONSE = (
    b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-type: text/plain\r\n"
    b"content-length: 33\r\n\r\nthe request's head took too long\n"
)


class HeaderTimeoutProtocol(H11Protocol):
    """Protocol that closes connections whose headers are incomplete after `HEADERS_WITHIN_S`.

    `load_limits.LoadLimits` limits the time for a body.
    """

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # h11 leaves IDLE once it has the whole head. Headers in one packet therefore cost no
        # timer; only a later request whose head comes in pieces starts another.
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._timer is None:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(HEADERS_WITHIN_S, self._on_timeout)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self) -> None:
        self._timer = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            # Without a byte of a request there is nothing to answer.
            if self.conn.trailing_data[0]:
                self.transport.write(TIMEOUT_RESPONSE)
            self.transport.close()
