"""What ranks send each other in a step, known to both sides before it begins."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.errors import InvalidInput
from ...core.graph.tensors import TensorSpec
from ...core.plan.schedule import Action, Schedule, Work
from ..partition.routes import TensorRoute, TensorRoutes
from ..ranks.process_groups import ProcessGroups, is_bound_to_devices

POSTED_AHEAD = 2
"""Receives posted on a connection before anything needs them: one message travels while another
waits to be used. More would take memory that the plan does not count."""


@dataclass(frozen=True)
class Message:
    """What one action makes for another stage.

    Attributes:
        route: The stages it goes between.
        is_gradient: Whether it goes back, from a backward, or on, from a forward.
        microbatch: Which one it belongs to.
    """

    route: TensorRoute
    is_gradient: bool
    microbatch: int

    @property
    def maker(self) -> int:
        """The stage that makes it."""
        return self.route.target if self.is_gradient else self.route.source

    @property
    def reader(self) -> int:
        """The stage that reads it."""
        return self.route.source if self.is_gradient else self.route.target

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """What it holds: activations, or the gradients of those that have one."""
        if not self.is_gradient:
            return self.route.tensors
        return tuple(spec for spec in self.route.tensors if spec.requires_grad)


def messages_sent_by(action: Action, routes: TensorRoutes) -> list[Message]:
    """What an action makes for other stages, in the order of its outputs or gradients."""
    if action.work is Work.FORWARD:
        return [Message(route, False, action.microbatch) for route in routes.out_of(action.stage)]
    if action.work in (Work.BACKWARD, Work.BACKWARD_INPUT):
        return [Message(route, True, action.microbatch) for route in routes.into(action.stage)]
    return []


def messages_received_by(action: Action, routes: TensorRoutes) -> list[Message]:
    """What an action reads of other stages, in the order of its inputs or gradients."""
    if action.work is Work.FORWARD:
        return [Message(route, False, action.microbatch) for route in routes.into(action.stage)]
    if action.work in (Work.BACKWARD, Work.BACKWARD_INPUT):
        return [Message(route, True, action.microbatch) for route in routes.out_of(action.stage)]
    return []


def list_incoming(
    actions: Sequence[Sequence[Action]], schedule: Schedule, routes: TensorRoutes, rank: int
) -> list[list[Message]]:
    """For each rank what it sends to this one, in the order in which it makes it.

    Args:
        actions: What every rank does.
        schedule: Which rank does which stage.
        routes: What stages send each other.
        rank: The receiver.
    """
    return [
        [
            message
            for action in theirs
            for message in messages_sent_by(action, routes)
            if sender != rank and schedule.rank_of(message.reader, message.microbatch) == rank
        ]
        for sender, theirs in enumerate(actions)
    ]


def find_connected_pairs(
    actions: Sequence[Sequence[Action]], schedule: Schedule, routes: TensorRoutes
) -> list[Pair]:
    """Return the sorted pairs of ranks with messages between them; see `list_incoming`."""
    made = {
        (sender, schedule.rank_of(message.reader, message.microbatch))
        for sender, theirs in enumerate(actions)
        for action in theirs
        for message in messages_sent_by(action, routes)
    }
    return sorted(pair for pair in made if pair[0] != pair[1])


class MessageTransport(Protocol):
    """Takes one rank's messages to others; see `P2PChannels`."""

    def begin(self, expected: Sequence[Sequence[Message]]) -> None: ...

    def send(self, message: Message, receiver: int, tensors: Sequence[Tensor]) -> None: ...

    def receive(self, message: Message, sender: int) -> list[Tensor]: ...

    def finish(self) -> None: ...


class P2PChannels:
    """Point-to-point messages of one rank; a step's messages are posted in their senders' order.

    Messages from one rank to another go through a channel (`make_channel_groups`). Both ends of it
    work in the same order, which is what NCCL asks for; and as senders never wait for a message to
    be taken, no order of work that a `Schedule` allows can end in ranks waiting for each other.

    Args:
        rank: This one.
        channels: Which group carries what this rank sends and receives.
        global_ranks: Of each rank, its number in the default group.
        device: Where received tensors are made.
    """

    def __init__(
        self,
        rank: int,
        channels: ChannelGroups,
        global_ranks: Sequence[int],
        device: torch.device,
    ) -> None:
        self._rank = rank
        self._channels = channels
        self._global_ranks = global_ranks
        self._device = device
        self._expected: dict[int, deque[Message]] = {}
        self._posted: dict[int, deque[_Receiving]] = {}
        self._arrived: dict[Message, list[Tensor]] = {}
        self._sending: deque[tuple[Any, Tensor]] = deque()

    def introduce(self) -> None:
        """Send a byte along each lane, in an order that is the same on all ranks.

        NCCL sets a connection up when it is first used, and both ends have to come.
        """
        byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
        for (sender, receiver), group in sorted(self._channels.items(), key=itemgetter(0)):
            if sender == self._rank:
                dist.send(byte, self._global_ranks[receiver], group=group)
            elif receiver == self._rank:
                dist.recv(byte, self._global_ranks[sender], group=group)

    def begin(self, expected: Sequence[Sequence[Message]]) -> None:
        """Post the first receives of a step.

        Args:
            expected: For each rank what it will send, as `list_incoming` lists it.
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
        check(message, tensors)
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()
        for tensor in tensors:
            channel = self._channels[self._rank, receiver]
            work = dist.isend(tensor, self._global_ranks[receiver], group=channel)
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
        channel, source = self._channels[sender, self._rank], self._global_ranks[sender]
        tensors = [_empty(spec, self._device) for spec in message.tensors]
        works = [dist.irecv(tensor, source, group=channel) for tensor in tensors]
        return _Receiving(message, tensors, [work.wait for work in works if work is not None])


@dataclass(frozen=True)
class _Receiving:
    message: Message
    tensors: list[Tensor]
    waits: list[Callable[[], Any]]

    def wait(self) -> list[Tensor]:
        for wait in self.waits:
            wait()
        return self.tensors


def check(message: Message, tensors: Sequence[Tensor]) -> None:
    """Refuse what would arrive as something else: the receiver has made room for the specs.

    Raises:
        InvalidInput: Naming the tensor.
    """
    for tensor, spec in zip(tensors, message.tensors, strict=True):
        found = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if found != (spec.shape, spec.dtype):
            kind = "gradient of" if message.is_gradient else "activation"
            raise InvalidInput(
                f"the {kind} {spec.name!r} for stage {message.reader} is {found[1]} {found[0]}, "
                f"but {spec.dtype} {spec.shape} was planned; call the pipeline outside of autocast "
                "and ask for it by autocast=, and plan for the batch that is given"
            )


def _empty(spec: TensorSpec, device: torch.device) -> Tensor:
    return torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)


Pair = tuple[int, int]
"""Sender and receiver."""

ChannelGroups = Mapping[Pair, dist.ProcessGroup]
"""The group of each pair that this rank is in."""


def make_channel_groups(ranks: ProcessGroups, pairs: Sequence[Pair]) -> ChannelGroups:
    """Groups in which no message waits for one of another pair; called on every rank.

    Two groups of all ranks do, one to higher ranks and one to lower: gloo works on all messages at
    once, and NCCL sets up a stream for each pair of a group. Unless the ranks were bound to their
    devices when they met (``init_process_group(device_id=...)``): then all messages of a group go
    through one stream in the order in which they are posted, and a receive that is posted ahead
    stands in the way of a send it waits for. So each pair gets a group of its own.

    Args:
        ranks: Of the pipeline.
        pairs: Between which something is sent, the same on every rank.
    """
    if not pairs:
        return {}
    if not is_bound_to_devices():
        upwards, downwards = ranks.everyone(), ranks.everyone()
        return {pair: upwards if pair[1] > pair[0] else downwards for pair in pairs}
    found: dict[Pair, dist.ProcessGroup] = {}
    for sender, receiver in sorted(pairs):
        both = (min(sender, receiver), max(sender, receiver))
        for group in ranks.of_sets([both]).values():
            found[sender, receiver] = group
    return found
