"""Point-to-point messages between the ranks of a step, known to both sides before it begins."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ...core.errors import InvalidInput
from ...core.graph.tensors import TensorSpec
from ...core.plan.schedule import POSTED_AHEAD, Action, Schedule, Work
from ..partition.routes import TensorRoute, TensorRoutes
from ..ranks.device_placement import queues_work
from ..ranks.process_groups import ProcessGroups, is_bound_to_devices
from ..ranks.rank_grid import RankGrid

RoutesOf = Callable[[int], Sequence[TensorRoute]]


@dataclass(frozen=True)
class Message:
    """The tensors that one action sends to another stage.

    A forward's goes to the later stage of its route, a backward's, with gradients, to the earlier.
    """

    route: TensorRoute
    is_gradient: bool
    microbatch: int

    @property
    def sending_stage(self) -> int:
        """Return the stage whose action produces it."""
        return self.route.target if self.is_gradient else self.route.source

    @property
    def receiving_stage(self) -> int:
        """Return the stage whose action reads it."""
        return self.route.source if self.is_gradient else self.route.target

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Return the specs of its activations, or of the gradients of those that have one."""
        if not self.is_gradient:
            return self.route.tensors
        return tuple(spec for spec in self.route.tensors if spec.requires_grad)

    @property
    def flow(self) -> Flow:
        """Return what tells the messages of one kind to one stage from all others."""
        return self.route.source, self.route.target, self.is_gradient


Flow = tuple[int, int, bool]
"""Source and target of a route, and whether gradients come back along it."""


def messages_sent_by(action: Action, routes: TensorRoutes) -> list[Message]:
    """Return an action's messages to other stages, in the order of its outputs or gradients."""
    return _messages(action, routes.out_of, routes.into)


def messages_received_by(action: Action, routes: TensorRoutes) -> list[Message]:
    """Return the messages an action reads, in the order of its inputs or gradients."""
    return _messages(action, routes.into, routes.out_of)


def _messages(action: Action, forwards: RoutesOf, backwards: RoutesOf) -> list[Message]:
    if action.work is Work.FORWARD:
        return [Message(route, False, action.microbatch) for route in forwards(action.stage)]
    if action.work in (Work.BACKWARD, Work.BACKWARD_INPUT):
        return [Message(route, True, action.microbatch) for route in backwards(action.stage)]
    return []


def list_incoming(
    actions: Sequence[Sequence[Action]], schedule: Schedule, routes: TensorRoutes, rank: int
) -> list[list[Message]]:
    """Return, for each rank, its messages to ``rank`` in the order in which it sends them."""
    found: list[list[Message]] = [[] for _ in actions]
    for (sender, receiver), message in _list_between(actions, schedule, routes):
        if receiver == rank:
            found[sender].append(message)
    return found


def list_reads(
    actions: Sequence[Action], incoming: Sequence[Sequence[Message]], routes: TensorRoutes
) -> list[Message]:
    """Return a rank's incoming messages in the order in which its actions read them."""
    arriving = {message for messages in incoming for message in messages}
    read = (message for action in actions for message in messages_received_by(action, routes))
    return [message for message in read if message in arriving]


Acknowledged = Mapping[Message, Sequence[Message]]
"""By incoming message, those of this rank that its sender had read when it made it."""


def list_acknowledged(
    actions: Sequence[Sequence[Action]], schedule: Schedule, routes: TensorRoutes, rank: int
) -> dict[Message, list[Message]]:
    """Return what each incoming message says of those that ``rank`` sent, each sent one once."""
    found: dict[Message, list[Message]] = {}
    for other, theirs in enumerate(actions):
        read: list[Message] = []
        for action in theirs if other != rank else ():
            for message in messages_received_by(action, routes):
                if schedule.rank_of(message.sending_stage, message.microbatch) == rank:
                    read.append(message)
            for message in messages_sent_by(action, routes):
                if schedule.rank_of(message.receiving_stage, message.microbatch) == rank:
                    found[message], read = read, []
    return found


def find_connected_pairs(
    actions: Sequence[Sequence[Action]],
    schedule: Schedule,
    routes: TensorRoutes,
    grid: RankGrid | None = None,
) -> list[Pair]:
    """Return the sorted pairs of ranks with messages between them; see `list_incoming`."""
    pairs = {pair for pair, _ in _list_between(actions, schedule, routes)}
    if grid is None:
        return sorted(pairs)
    return sorted(
        (grid.sender_to(rank, sender), rank)
        for sender, receiver in pairs
        for rank in grid.ranks_of(receiver)
    )


def _list_between(
    actions: Sequence[Sequence[Action]], schedule: Schedule, routes: TensorRoutes
) -> Iterator[tuple[Pair, Message]]:
    """Yield the messages between different ranks, each sender's in its order."""
    for sender, theirs in enumerate(actions):
        for action in theirs:
            for message in messages_sent_by(action, routes):
                receiver = schedule.rank_of(message.receiving_stage, message.microbatch)
                if receiver != sender:
                    yield (sender, receiver), message


class MessageTransport(Protocol):
    """Carrier of one rank's messages to and from the others; see `P2PChannels`."""

    def begin(
        self,
        expected: Sequence[Sequence[Message]],
        reads: Sequence[Message],
        acknowledged: Acknowledged,
    ) -> None: ...

    def send(self, message: Message, receiver: int, tensors: Sequence[Tensor]) -> None: ...

    def receive(self, message: Message, sender: int) -> list[Tensor]: ...

    def finish(self) -> None: ...


class P2PChannels:
    """One rank's channels over ``torch.distributed``, one per ordered pair of ranks.

    Both ends of a channel work through its messages in the sender's order, as NCCL requires, on a
    stream of its own. Senders never wait for a message to be taken. Therefore no order of work that
    a `Schedule` allows can end in a deadlock, also where hosts only launch work and devices wait.

    For suppose that some actions never run. In a schedule every action comes after those that are
    earlier on its rank and those that send what it reads, without circles, so one of the actions
    that never run comes after finished ones only. What it reads was sent, and so was everything
    earlier in those channels, by earlier actions of the same ranks. The host has posted the
    receives, because it waits for nothing before the end of the step; and they wait only for
    actions that were launched before them, which are finished. So the messages arrive and the
    action runs. Collectives between replicas are launched after an action, in one order on all
    ranks (`deadlock_check`). This needs what `device_placement.prepare_cuda` sets, and channels
    that are connected before the first step. It also needs room: NCCL's kernels of all channels and
    groups that are under way must fit on the GPU together, and a ``cudaMalloc`` of the first step
    must not wait for them. ``tests/nccl`` replays the order of every schedule without either limit.

    Where ranks share the work of one of the schedule (tensor parallelism, ``grid``), all of them
    perform an action together, so it is one action above. Each of them gets its own copy of a
    message; senders and receivers named by callers are ranks of the schedule.

    ``channels`` are those this rank is an end of; ``global_ranks`` holds the rank in the default
    group of each rank of the pipeline.
    """

    def __init__(
        self,
        rank: int,
        channels: ChannelGroups,
        global_ranks: Sequence[int],
        device: torch.device,
        grid: RankGrid | None = None,
    ) -> None:
        self._rank, self._channels = rank, channels
        self._global_ranks, self._device = global_ranks, device
        self._grid = grid or RankGrid((1,) * len(global_ranks))
        self._expected: dict[int, deque[Message]] = {}
        self._sender: dict[Message, int] = {}
        self._unread: dict[Flow, deque[Message]] = {}
        self._posted: dict[Message, _PostedReceive] = {}
        self._acknowledged: Acknowledged = {}
        self._sending: dict[Message, list[tuple[Any, Tensor]]] = {}

    def connect(self) -> None:
        """Set up every channel by sending a byte through it.

        NCCL connects a pair at its first message, and both ends must take part at the same time.
        All ranks go through the channels in the same order, so none waits in a circle.
        """
        byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
        for (sender, receiver), group in sorted(self._channels.items(), key=itemgetter(0)):
            if sender == self._rank:
                dist.send(byte, self._global_ranks[receiver], group=group)
            elif receiver == self._rank:
                dist.recv(byte, self._global_ranks[sender], group=group)

    def begin(
        self,
        expected: Sequence[Sequence[Message]],
        reads: Sequence[Message],
        acknowledged: Acknowledged,
    ) -> None:
        """Post the first receives of a step.

        ``expected`` holds each rank's messages in sending order (`list_incoming`), ``reads`` all of
        them in the order in which they are read (`list_reads`); `list_acknowledged` made the last.
        """
        # A step that an error interrupted leaves messages behind; a new step starts from nothing.
        self._expected = {rank: deque(messages) for rank, messages in enumerate(expected)}
        self._sender = {each: rank for rank, messages in enumerate(expected) for each in messages}
        self._posted, self._unread = {}, {}
        # gloo does not say when a send is complete, and waiting for it could block. Of several
        # receivers only one acknowledges.
        is_alone = not self._grid.is_shared
        self._acknowledged = acknowledged if is_alone and not queues_work(self._device) else {}
        for message in reads:
            self._unread.setdefault(message.flow, deque()).append(message)
        for sender in self._expected:
            self._post_ahead(sender)

    def send(self, message: Message, receiver: int, tensors: Sequence[Tensor]) -> None:
        """Send a message without waiting for the receiver."""
        check_message(message, tensors)
        # Tensors are kept alive while the transport reads them. Completed sends are dropped here
        # rather than at the end of the step, so that their memory is freed early.
        for earlier, sends in list(self._sending.items()):
            if not all(work.is_completed() for work, _ in sends):
                break
            del self._sending[earlier]
        carried = [_as_carried(tensor) for tensor in tensors]
        targets = [
            (self._global_ranks[rank], self._channels[self._rank, rank])
            for rank in self._grid.receivers_from(self._rank, receiver)
        ]
        self._sending[message] = [
            (dist.isend(each, target, group=channel), each)
            for target, channel in targets
            for each in carried
        ]

    def receive(self, message: Message, sender: int) -> list[Tensor]:
        """Return a message's tensors once it has arrived."""
        # A schedule may read messages in another order than they were sent (interleaved stages,
        # direct sends). A channel delivers in sending order, so earlier ones are posted before it.
        while message not in self._posted:
            self._post_next(sender)
        receive = self._posted.pop(message)
        unread = self._unread[message.flow]
        unread.remove(message)
        # Before waiting, so that the next messages travel meanwhile.
        for other in islice(unread, POSTED_AHEAD):
            self._post_ahead(self._sender[other])
        found = receive.wait()
        for taken in self._acknowledged.get(message, ()):
            for work, _ in self._sending.pop(taken, ()):
                work.wait()  # complete by now: its receiver went on from it
        return found

    def finish(self) -> None:
        """Wait until every send has completed."""
        for sends in self._sending.values():
            for work, _ in sends:
                work.wait()
        self._sending.clear()

    def _post_ahead(self, sender: int) -> None:
        """Post a channel's next receives, as long as each is of a message that is read soon."""
        expected = self._expected[sender]
        while expected and expected[0] in islice(self._unread[expected[0].flow], POSTED_AHEAD):
            self._post_next(sender)

    def _post_next(self, sender: int) -> None:
        message = self._expected[sender].popleft()
        self._posted[message] = self._post_receive(message, sender)

    def _post_receive(self, message: Message, sender: int) -> _PostedReceive:
        rank = self._grid.sender_to(self._rank, sender)
        channel, source = self._channels[rank, self._rank], self._global_ranks[rank]
        tensors = [
            torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=self._device)
            for spec in message.tensors
        ]
        works = [dist.irecv(_as_carried(tensor), source, group=channel) for tensor in tensors]
        return _PostedReceive(message, tensors, [work.wait for work in works if work is not None])


@dataclass(frozen=True)
class _PostedReceive:
    message: Message
    tensors: list[Tensor]
    waits: list[Callable[[], Any]]

    def wait(self) -> list[Tensor]:
        for wait in self.waits:
            wait()
        return self.tensors


NCCL_DTYPES = {
    torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
}  # fmt: skip
"""Dtypes that NCCL carries in every version that torch 2.11 is built with."""


def _as_carried(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor, or a view of its bytes if NCCL does not know its dtype."""
    return tensor if tensor.dtype in NCCL_DTYPES else tensor.view(-1).view(torch.uint8)


def check_message(message: Message, tensors: Sequence[Tensor]) -> None:
    """Check that tensors have the shapes and dtypes for which the receiver allocated memory.

    Transports do not compare the two ends: NCCL would deliver garbage, or wait for the rest.
    """
    for tensor, spec in zip(tensors, message.tensors, strict=True):
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        if (shape, dtype) != (spec.shape, spec.dtype):
            kind = "gradient of" if message.is_gradient else "activation"
            raise InvalidInput(
                f"the {kind} {spec.name!r} for stage {message.receiving_stage} is {dtype} {shape}, "
                f"but {spec.dtype} {spec.shape} was planned; call the pipeline outside of autocast "
                "and use its autocast= instead, and plan for the batch size you pass"
            )


Pair = tuple[int, int]
"""Sending and receiving rank."""

ChannelGroups = Mapping[Pair, dist.ProcessGroup]
"""The process group of each channel that this rank is an end of."""


def make_channel_groups(ranks: ProcessGroups, pairs: Sequence[Pair]) -> ChannelGroups:
    """Create process groups in which no message waits for one of another pair, on every rank.

    Usually two groups of all ranks suffice, one for messages to higher ranks and one to lower:
    gloo progresses all messages at once, and NCCL uses one stream per pair of a group.

    Ranks that were bound to their devices (``init_process_group(device_id=...)``) are different:
    NCCL then runs all messages of a group on a single stream in posting order. A receive that was
    posted ahead would block a send behind it, whose receiver may be what that receive waits for:
    a deadlock. So each pair gets a group of its own.

    ``pairs`` are all pairs with messages between them, identical on every rank.
    """
    if not pairs:
        return {}
    if not is_bound_to_devices():
        upwards, downwards = ranks.create_group_of_all(), ranks.create_group_of_all()
        return {pair: upwards if pair[1] > pair[0] else downwards for pair in pairs}
    found: dict[Pair, dist.ProcessGroup] = {}
    # Creating a group is a collective call: the order must be the same on all ranks.
    for sender, receiver in sorted(pairs):
        both = (min(sender, receiver), max(sender, receiver))
        for group in ranks.create_groups([both]).values():
            found[sender, receiver] = group
    return found
