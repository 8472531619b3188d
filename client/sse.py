"""Server-sent events out of the text of a stream (HTML standard, section 9.2)."""

from __future__ import annotations

import json
from collections.abc import Iterator

from ..core.errors import StagewrightError
from ..core.service.jobs import JobEvent

MAX_PENDING_CHARACTERS = 2**20
"""Of one event; far more than any has."""


class EventParser:
    """Takes text in any pieces and gives whole events; half an event at the end is no event."""

    def __init__(self) -> None:
        self._rest = ""
        self._fields: dict[str, str] = {}

    def feed(self, text: str) -> Iterator[JobEvent]:
        """The events that a piece of text completes.

        Raises:
            StagewrightError: The stream is none of a job's events.
        """
        *lines, self._rest = (self._rest + text).split("\n")
        if len(self._rest) > MAX_PENDING_CHARACTERS:
            raise StagewrightError("an event of the service is too long to be one")
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
            return  # a comment: a sign of life
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
        raise StagewrightError(f"the service sent an event that cannot be read: {error}") from None
