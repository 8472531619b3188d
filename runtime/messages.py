"""What ranks send each other in a step, known to both sides before it begins."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.errors import InvalidInput
from ..core.graph import Boundary
from ..core.schedule import Action, Schedule, Work
from ..core.tensors import TensorSpec

POSTED_AHEAD = 2
"""Receives posted on a connection before anything needs them: one message travels while another
waits to be used. More would take memory that the plan does not count."""


@dataclass(frozen=True)
class Message:
    """What one action makes for another stage.

    Attributes:
        is_gradient: Whether it goes back, from a backward, or on, from a forward.
        stage: The stage that reads it.
        microbatch: Which one it belongs to.
    """

    is_gradient: bool
    stage: int
    microbatch: int


def message_of(action: Action, num_stages: int) -> Message | None:
    """What an action makes for another stage; `None` at the ends and where nothing is made."""
    if action.work is Work.FORWARD and action.stage + 1 < num_stages:
        return Message(False, action.stage + 1, action.microbatch)
    if action.work in (Work.BACKWARD, Work.BACKWARD_INPUT) and action.stage:
        return Message(True, action.stage - 1, action.microbatch)
    return None


def incoming(
    actions: Sequence[Sequence[Action]], schedule: Schedule, rank: int
) -> list[list[Message]]:
    """For each rank what it sends to this one, in the order in which it makes it.

    Args:
        actions: What every rank does.
        schedule: Which rank does which stage.
        rank: The receiver.
    """
    found: list[list[Message]] = []
    for sender, theirs in enumerate(actions):
        made = (message_of(action, schedule.num_stages) for action in theirs)
        found.append(
            [
                message
                for message in made
                if message is not None
                and sender != rank
                and schedule.rank_of(message.stage, message.microbatch) == rank
            ]
        )
    return found


class Connections:
    """Point-to-point messages of one rank; a step's messages are posted in their senders' order.

    Messages between two ranks go through one group upwards, from the lower rank to the higher, and
    through another downwards. Both ends of each connection then work in the same order, which is
    what NCCL asks for; and as senders never wait for a message to be taken, no order of work that
    a `Schedule` allows can end in ranks waiting for each other.

    Args:
        rank: This one.
        upwards: A group of all ranks, for messages to higher ranks.
        downwards: Another, for messages to lower ranks.
        global_ranks: Of each rank, its number in the default group.
        boundaries: What crosses each cut, and so what a message holds.
        device: Where received tensors are made.
    """

    def __init__(
        self,
        rank: int,
        upwards: dist.ProcessGroup | None,
        downwards: dist.ProcessGroup | None,
        global_ranks: Sequence[int],
        boundaries: Sequence[Boundary],
        device: torch.device,
    ) -> None:
        self._rank = rank
        self._groups = (downwards, upwards)
        self._global_ranks = global_ranks
        self._boundaries = boundaries
        self._device = device
        self._expected: dict[int, deque[Message]] = {}
        self._posted: dict[int, deque[_Receiving]] = {}
        self._arrived: dict[Message, list[Tensor]] = {}
        self._sending: deque[tuple[Any, Tensor]] = deque()

    def introduce(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Send a byte along each connection, in an order that is the same on all ranks.

        NCCL sets a connection up when it is first used, and both ends have to come.

        Args:
            pairs: Sender and receiver of all messages, sorted.
        """
        byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
        for sender, receiver in pairs:
            group = self._groups[receiver > sender]
            if sender == self._rank:
                dist.send(byte, self._global_ranks[receiver], group=group)
            elif receiver == self._rank:
                dist.recv(byte, self._global_ranks[sender], group=group)

    def begin(self, expected: Sequence[Sequence[Message]]) -> None:
        """Post the first receives of a step.

        Args:
            expected: For each rank what it will send, as `incoming` lists it.
        """
        self._expected = {rank: deque(messages) for rank, messages in enumerate(expected)}
        self._posted = {rank: deque() for rank in self._expected}
        self._arrived = {}
        for rank in self._expected:
            self._post(rank)

    def send(self, message: Message, receiver: int, tensors: Sequence[Tensor]) -> None:
        """Send a message, without waiting for the receiver.

        Raises:
            InvalidInput: It is not of the shapes and dtypes that the receiver expects.
        """
        _check(message, tensors, held_by(message, self._boundaries))
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()
        group = self._groups[receiver > self._rank]
        for tensor in tensors:
            work = dist.isend(tensor, self._global_ranks[receiver], group=group)
            self._sending.append((work, tensor))

    def receive(self, message: Message, sender: int) -> list[Tensor]:
        """What a message holds, once it has arrived."""
        posted = self._posted[sender]
        while message not in self._arrived:
            if not posted:
                self._post(sender)
            receiving = posted.popleft()
            self._post(sender)
            self._arrived[receiving.message] = receiving.wait()
        return self._arrived.pop(message)

    def finish(self) -> None:
        """Wait until all that was sent has been taken."""
        while self._sending:
            self._sending.popleft()[0].wait()

    def _post(self, sender: int) -> None:
        expected, posted = self._expected[sender], self._posted[sender]
        while expected and len(posted) < POSTED_AHEAD:
            posted.append(self._start(expected.popleft(), sender))

    def _start(self, message: Message, sender: int) -> _Receiving:
        group = self._groups[self._rank > sender]
        tensors = [_empty(spec, self._device) for spec in held_by(message, self._boundaries)]
        works = [dist.irecv(tensor, self._global_ranks[sender], group=group) for tensor in tensors]
        return _Receiving(message, tensors, [work.wait for work in works if work is not None])


def held_by(message: Message, boundaries: Sequence[Boundary]) -> tuple[TensorSpec, ...]:
    """The tensors of a message: activations, or the gradients of those that have one."""
    if not message.is_gradient:
        return boundaries[message.stage - 1].tensors
    return tuple(spec for spec in boundaries[message.stage].tensors if spec.requires_grad)


@dataclass(frozen=True)
class _Receiving:
    message: Message
    tensors: list[Tensor]
    waits: list[Callable[[], Any]]

    def wait(self) -> list[Tensor]:
        for wait in self.waits:
            wait()
        return self.tensors


def _check(message: Message, tensors: Sequence[Tensor], specs: Sequence[TensorSpec]) -> None:
    """Refuse what would arrive as something else: the receiver has made room for the specs."""
    for tensor, spec in zip(tensors, specs, strict=True):
        found = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if found != (spec.shape, spec.dtype):
            kind = "gradient of" if message.is_gradient else "activation"
            raise InvalidInput(
                f"the {kind} {spec.name!r} for stage {message.stage} is {found[1]} {found[0]}, but "
                f"{spec.dtype} {spec.shape} was planned; call the pipeline outside of autocast and "
                "ask for it by autocast=, and plan for the batch that is given"
            )


def _empty(spec: TensorSpec, device: torch.device) -> Tensor:
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
