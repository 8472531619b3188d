"""Parser of server-sent events (HTML standard, section 9.2)."""

from __future__ import annotations

import json
from collections.abc import Iterator

from ..core.errors import StagewrightError
from ..core.service.jobs import JobEvent

MAX_PENDING_CHARACTERS = 2**20
"""Longest line accepted; keeps a misbehaving server from filling the client's memory."""


class EventParser:
    """Incremental parser: takes text in chunks of any size and yields complete events.

    An incomplete event at the end of the stream is discarded, as the standard says.
    """

    def __init__(self) -> None:
        self._rest = ""
        self._fields: dict[str, str] = {}

    def feed(self, text: str) -> Iterator[JobEvent]:
        """Yield the events that a chunk of text completes."""
        *lines, self._rest = (self._rest + text).split("\n")
        if len(self._rest) > MAX_PENDING_CHARACTERS:
            raise StagewrightError("the service's event stream has an overlong line")
        for line in (entry.removesuffix("\r") for entry in lines):
            if line:
                self._take(line)
            elif fields := self._fields:
                self._fields = {}
                if "data" in fields:
                    yield _event(fields)

    def _take(self, line: str) -> None:
        name, _, value = line.partition(":")
        if not name:
            return  # a line that starts with a colon is a comment: the service's heartbeat
        value = value.removeprefix(" ")
        if name == "data" and "data" in self._fields:
            value = f"{self._fields['data']}\n{value}"
        self._fields[name] = value


def _event(fields: dict[str, str]) -> JobEvent:
    try:
        return JobEvent.model_validate(
            {
                "number": int(fields["id"]),
                "kind": fields["event"],
                "data": json.loads(fields["data"]),
            }
        )
    except (KeyError, ValueError) as error:
        raise StagewrightError(f"the service sent an invalid event: {error}") from None
