"""Replay of what every rank launched, in the order in which NCCL and CUDA streams would run it.

Each thread of a rank's host goes through its entries one by one and rarely waits; the streams
follow at their own pace. Whether the ranks of a program can block each other for ever depends only
on the order of these entries, so it is found after a run, whatever its timing was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

Queue = tuple[str, ...]
"""A stream of a communicator: names that its members share."""


@dataclass(frozen=True)
class Launch:
    """The host launches an operation; it starts after what its stream and compute wait for.

    Attributes:
        queue: The communicator's stream, in which operations run in launch order.
        ranks: All ranks that must launch it; a message has two.
        what: The operation in words; equal on all of its ranks for a collective.
        sender: The sending rank of a message; `None` for a collective.
    """

    queue: Queue
    ranks: tuple[int, ...]
    what: str
    sender: int | None = None


@dataclass(frozen=True)
class StreamWait:
    """The compute stream waits for the rank's launch of this number; the host goes on."""

    launch: int


@dataclass(frozen=True)
class HostRead:
    """The host waits until the compute stream has run, as it does to read a value.

    Attributes:
        what: What it reads.
        waits: How many of its waits the stream must have passed; `None` for all so far.
    """

    what: str
    waits: int | None = None


@dataclass(frozen=True)
class DeviceSynchronise:
    """The host waits until everything that was launched has run, on all streams."""

    what: str = "torch.cuda.synchronize"


@dataclass(frozen=True)
class Connect:
    """The host waits for all members of a communicator that is made when it is first used."""

    communicator: Queue
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class HostMeeting:
    """The host waits until all ranks of an operation over gloo have come to it."""

    what: Queue
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class FirstUse:
    """The host launches a kernel for the first time."""

    what: str


@dataclass(frozen=True)
class InThread:
    """What follows in the log was done by this thread of the host; at first it is the main one."""

    name: str


MAIN = "MainThread"
"""Python's name of a process's main thread."""

Act = Launch | StreamWait | HostRead | DeviceSynchronise | Connect | HostMeeting | FirstUse

Entry = Act | InThread


@dataclass(frozen=True)
class Cuda:
    """Settings of CUDA.

    Attributes:
        loads_lazily: A kernel is loaded when it is first used, for which the device must be idle.
        has_one_connection: All streams share one queue to the device, so that nothing starts before
            what was launched earlier has started.
    """

    loads_lazily: bool = False
    has_one_connection: bool = False


USUAL = Cuda()


def find_deadlock(logs: Sequence[Sequence[Entry]], cuda: Cuda = USUAL) -> str | None:
    """Replay the logs of all ranks; return who waits for whom if they cannot all end."""
    ranks = [_Rank(rank, log, cuda) for rank, log in enumerate(logs)]
    while any([rank.advance(ranks) for rank in ranks]):  # a list: every rank takes its turn
        pass
    if all(rank.is_done for rank in ranks):
        return None
    return "\n".join(_describe_cycle(ranks))


@dataclass(eq=False)
class _Operation:
    launch: Launch
    number: int
    computed_before: int
    """Items of the compute stream that must have run before it starts."""
    is_done: bool = False


@dataclass
class _Thread:
    """One thread of a host; a launch has its number."""

    name: str
    acts: list[tuple[Act, int]] = field(default_factory=list)
    position: int = 0

    @property
    def next_act(self) -> Act | None:
        """Return what it has to do next; `None` at its end."""
        return self.acts[self.position][0] if self.position < len(self.acts) else None


def _split_threads(log: Sequence[Entry]) -> list[_Thread]:
    """Return the threads of a log, each with what it did in its own order; the main one first.

    Nothing orders two threads, so a deadlock that their order in the log would avoid is found, too.
    """
    threads = {MAIN: _Thread(MAIN)}
    thread, launches = threads[MAIN], 0
    for entry in log:
        if isinstance(entry, InThread):
            thread = threads.setdefault(entry.name, _Thread(entry.name))
        else:
            thread.acts.append((entry, launches))
            launches += isinstance(entry, Launch)
    return list(threads.values())


@dataclass
class _Rank:
    rank: int
    log: Sequence[Entry]
    cuda: Cuda
    threads: list[_Thread] = field(default_factory=list)
    launched: dict[int, _Operation] = field(default_factory=dict)
    compute: list[int] = field(default_factory=list)
    """Numbers of the operations that the compute stream waits for, in its order."""
    computed: int = 0
    queues: dict[Queue, deque[_Operation]] = field(default_factory=dict)
    meetings: dict[Act, tuple[_Thread, int]] = field(default_factory=dict)
    """Where which thread meets other ranks' hosts."""
    connection: deque[_Operation | int] = field(default_factory=deque)
    """What has not started, in the order of the only connection; a number is an item of compute."""

    def __post_init__(self) -> None:
        self.threads = _split_threads(self.log)
        self.meetings = {
            act: (thread, at)
            for thread in self.threads
            for at, (act, _) in enumerate(thread.acts)
            if isinstance(act, Connect | HostMeeting)
        }

    @property
    def is_done(self) -> bool:
        return self.is_idle and all(thread.next_act is None for thread in self.threads)

    @property
    def is_idle(self) -> bool:
        return self.computed == len(self.compute) and not any(self.queues.values())

    def advance(self, ranks: Sequence[_Rank]) -> bool:
        """Go as far as possible; return True if anything moved."""
        moved = False
        while (
            any([self._step_host(thread, ranks) for thread in self.threads])
            or self._step_compute()
            or self._step_queues(ranks)
        ):
            moved = True
        return moved

    def _step_host(self, thread: _Thread, ranks: Sequence[_Rank]) -> bool:
        if thread.next_act is None or self.blocker(thread, ranks) is not None:
            return False
        act, number = thread.acts[thread.position]
        thread.position += 1
        if isinstance(act, Launch):
            operation = _Operation(act, number, len(self.compute))
            self.launched[number] = operation
            self.connection.append(operation)
            self.queues.setdefault(act.queue, deque()).append(operation)
        elif isinstance(act, StreamWait):
            self.connection.append(len(self.compute))
            self.compute.append(act.launch)
        return True

    def blocker(self, thread: _Thread, ranks: Sequence[_Rank]) -> str | None:
        """Return what a thread's next act has to wait for; `None` if it can go on."""
        act = thread.next_act
        if isinstance(act, HostRead):
            wanted = len(self.compute) if act.waits is None else act.waits
            return act.what if self.computed < wanted else None
        if isinstance(act, StreamWait) and act.launch not in self.launched:
            return "an operation that another thread launches"
        synchronises = isinstance(act, DeviceSynchronise) or (
            isinstance(act, FirstUse) and self.cuda.loads_lazily
        )
        if synchronises and not self.is_idle:
            return act.what
        if isinstance(act, Connect) and _missing(act, ranks) is not None:
            return f"connecting {' '.join(act.communicator)}"
        if isinstance(act, HostMeeting) and _missing(act, ranks) is not None:
            return " ".join(act.what)
        return None

    def has_reached(self, meeting: Connect | HostMeeting) -> bool:
        """Return True if the host is at this meeting or past it."""
        if meeting not in self.meetings:
            return False
        thread, at = self.meetings[meeting]
        return at <= thread.position

    def _step_compute(self) -> bool:
        if self.computed == len(self.compute):
            return False
        if not self.launched[self.compute[self.computed]].is_done:
            return False
        if not self._starts(self.computed):
            return False
        self.computed += 1
        return True

    def _starts(self, item: _Operation | int) -> bool:
        """Return True if an item whose stream is ready for it has started, or starts now."""
        if not self.cuda.has_one_connection or item not in self.connection:
            return True
        if self.connection[0] != item:
            return False
        self.connection.popleft()
        return True

    def _step_queues(self, ranks: Sequence[_Rank]) -> bool:
        moved = False
        for queue in self.queues:
            if (operation := self.head(queue)) is not None:
                others = [ranks[member].head(queue) for member in operation.launch.ranks]
                if all(each is not None and _match(each, operation) for each in others):
                    for member in operation.launch.ranks:
                        ranks[member].queues[queue].popleft().is_done = True
                    moved = True
        return moved

    def head(self, queue: Queue) -> _Operation | None:
        """Return the operation that a stream would run now, if it may start."""
        waiting = self.queues.get(queue)
        if not waiting or waiting[0].computed_before > self.computed:
            return None
        return waiting[0] if self._starts(waiting[0]) else None


def _match(one: _Operation, other: _Operation) -> bool:
    """Return True if two ranks' operations are each other's counterparts."""
    a, b = one.launch, other.launch
    return (a.ranks, a.what, a.sender) == (b.ranks, b.what, b.sender)


def _describe_cycle(ranks: Sequence[_Rank]) -> Iterator[str]:
    """Follow from a stuck rank what each waits for, until a rank comes again."""
    rank: int | None = next(each.rank for each in ranks if not each.is_done)
    seen: list[int] = []
    lines: list[str] = []
    while rank is not None and rank not in seen and not ranks[rank].is_done:
        seen.append(rank)
        words, rank = _find_wait(ranks[seen[-1]], ranks)
        lines.append(f"rank {seen[-1]}: {words}")
    if rank not in seen:
        yield "no rank can go on, and not because of each other:"
        yield from lines
    else:
        yield "ranks wait for each other in a circle:"
        yield from lines[seen.index(rank) :]


def _missing(meeting: Connect | HostMeeting, ranks: Sequence[_Rank]) -> int | None:
    """Return the first rank that has not come to a meeting."""
    return next((rank for rank in meeting.ranks if not ranks[rank].has_reached(meeting)), None)


def _find_wait(rank: _Rank, ranks: Sequence[_Rank]) -> tuple[str, int | None]:
    """Return what a rank waits for, in words, and the rank that it waits for."""
    host = "the host has launched everything"
    stuck_threads = [thread for thread in rank.threads if thread.next_act is not None]
    # Those that wait for other threads, here or in other ranks, come last: they are no cause.
    stuck_threads.sort(key=lambda thread: isinstance(thread.next_act, HostMeeting))
    stuck_threads.sort(key=lambda thread: isinstance(thread.next_act, StreamWait))
    if stuck_threads:
        thread = stuck_threads[0]
        blocker = rank.blocker(thread, ranks)
        assert blocker is not None
        waits = "waits" if thread.name == MAIN else f"waits in thread {thread.name!r}"
        host = f"the host {waits} ({blocker})"
        act = thread.next_act
        if isinstance(act, Connect | HostMeeting):
            missing = _missing(act, ranks)
            return f"{host} for rank {missing}", missing
    stuck = _blocking_operation(rank)
    launch = stuck.launch
    behind = ""
    first = rank.queues[launch.queue][0]
    if first is not stuck:
        behind = f", behind {first.launch.what}"
        launch = first.launch
    missing_rank = next(
        (
            member
            for member in launch.ranks
            if (head := ranks[member].head(launch.queue)) is None or not _match(head, first)
        ),
        None,
    )
    where = " ".join(launch.queue)
    return f"{host}; {stuck.launch.what}{behind}, on {where}, waits for rank {missing_rank}", (
        missing_rank if missing_rank != rank.rank else None
    )


def _blocking_operation(rank: _Rank) -> _Operation:
    """Return the operation that the compute stream waits for, or else the first in any queue."""
    if rank.computed < len(rank.compute):
        return rank.launched[rank.compute[rank.computed]]
    return next(waiting[0] for waiting in rank.queues.values() if waiting)
