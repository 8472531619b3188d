"""What ranks send and sum, where all of them are in one process and take turns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..ranks.collective import Work
from .p2p import Message, check


class Mail:
    """Messages between ranks that have not been read yet."""

    def __init__(self) -> None:
        self._waiting: dict[Message, list[Tensor]] = {}

    def has(self, messages: Sequence[Message]) -> bool:
        return all(message in self._waiting for message in messages)

    def put(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Take copies, as a message between machines is one."""
        self._waiting[message] = [tensor.clone() for tensor in tensors]

    def take(self, message: Message) -> list[Tensor]:
        return self._waiting.pop(message)


class MailBox:
    """One rank's `messages.Carrier` over a `Mail`."""

    def __init__(self, mail: Mail) -> None:
        self._mail = mail

    def begin(self, expected: Sequence[Sequence[Message]]) -> None:
        """Nothing has to be made ready."""

    def send(self, message: Message, receiver: int, tensors: Sequence[Tensor]) -> None:
        """See `messages.Connections.send`."""
        check(message, tensors)
        for tensor in tensors:
            assert tensor.is_contiguous(), "a stage's boundary makes what it sends contiguous"
        self._mail.put(message, tensors)

    def receive(self, message: Message, sender: int) -> list[Tensor]:
        """Called when it is there."""
        return self._mail.take(message)

    def finish(self) -> None:
        """All was taken as it was sent."""


class Meeting:
    """What ranks have given each other so far: of each call, every rank's tensor."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._calls: list[dict[int, Tensor]] = []

    def give(self, place: int, number: int, tensor: Tensor) -> dict[int, Tensor]:
        """One rank's part in the so manieth call."""
        if number == len(self._calls):
            self._calls.append({})
        self._calls[number][place] = tensor.clone()
        return self._calls[number]


class Seat:
    """One rank's `collective.Collective` in a `Meeting`; it waits when all have called."""

    def __init__(self, meeting: Meeting, place: int) -> None:
        self._meeting, self._place = meeting, place
        self._calls = 0

    def sum(self, tensor: Tensor) -> Work:
        return _Pending(self._given(tensor), self._meeting.size, summed=tensor)

    def gather(self, tensor: Tensor) -> tuple[list[Tensor], Work]:
        found = [torch.empty_like(tensor) for _ in range(self._meeting.size)]
        return found, _Pending(self._given(tensor), self._meeting.size, gathered=found)

    def _given(self, tensor: Tensor) -> dict[int, Tensor]:
        self._calls += 1
        return self._meeting.give(self._place, self._calls - 1, tensor)


class _Pending:
    def __init__(
        self,
        parts: dict[int, Tensor],
        size: int,
        *,
        summed: Tensor | None = None,
        gathered: Sequence[Tensor] = (),
    ) -> None:
        self._parts, self._size = parts, size
        self._summed, self._gathered = summed, gathered

    def wait(self) -> None:
        assert len(self._parts) == self._size, "not all ranks are here"
        parts = [self._parts[place] for place in sorted(self._parts)]
        if self._summed is not None:
            self._summed.copy_(torch.stack(parts).sum(0))
        for found, part in zip(self._gathered, parts, strict=False):
            found.copy_(part)
