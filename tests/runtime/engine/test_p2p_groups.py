"""No order of work ends in ranks waiting for each other, whatever shares a stream with what.

Where ranks are bound to their devices (``init_process_group(device_id=...)``) NCCL takes what one
group sends and receives in the order in which it was posted. All messages went through two groups
then, and pipelines of three ranks and more never finished their first step.
"""

import itertools
import weakref

import pytest
import torch
import torch.distributed as dist

from stagewright.core.graph.tensors import TensorSpec
from stagewright.core.plan.schedule import POSTED_AHEAD
from stagewright.runtime.engine import p2p
from stagewright.runtime.engine.p2p import (
    P2PChannels,
    find_connected_pairs,
    list_acknowledged,
    list_incoming,
    list_reads,
    make_channel_groups,
    messages_received_by,
    messages_sent_by,
)
from stagewright.runtime.partition.routes import TensorRoute, TensorRoutes
from stagewright.runtime.ranks import device_placement
from stagewright.runtime.ranks.process_groups import ProcessGroups
from stagewright.schedules.make_schedule import make_schedule

SPEC = TensorSpec(name="h", shape=(1,), dtype="float32", requires_grad=True)
CELLS = [
    ("gpipe", 3, 4, 1), ("1f1b", 3, 6, 1), ("1f1b", 4, 8, 1), ("interleaved_1f1b", 8, 8, 2),
    ("zero_bubble", 4, 8, 1), ("zbv", 8, 8, 2),
]  # fmt: skip
STUCK_IN_TWO = CELLS[1:]


class Transfer:
    """A send or a receive, as one rank posted it."""

    def __init__(self, stream, peer, sends, waited):
        self.stream, self.peer, self.sends = stream, peer, sends
        self.waited = waited  # receives that the rank has waited for before it posted this
        self.done = False


class Wire:
    """Stands in for ``torch.distributed``: notes what each rank posts, on which stream."""

    def __init__(self):
        self.posted, self.waited, self.rank = {}, [], 0

    def isend(self, tensor, peer, group):
        return self._post(group, peer, sends=True)

    def irecv(self, tensor, peer, group):
        return self._post(group, peer, sends=False)

    def is_completed(self):
        return False

    def _post(self, group, peer, *, sends):
        transfer = Transfer((self.rank, group), peer, sends, list(self.waited))
        self.posted.setdefault(transfer.stream, []).append(transfer)
        return Work(self, transfer)


class Work:
    def __init__(self, wire, transfer):
        self._wire, self._transfer = wire, transfer

    def wait(self):
        if not self._transfer.sends:
            self._wire.waited.append(self._transfer)

    def is_completed(self):
        return False


def finishes(wire):
    """Whether all transfers do, if each stream takes its own in order (NCCL's semantics)."""
    queues = {stream: list(transfers) for stream, transfers in wire.posted.items()}
    moved = True
    while moved:
        moved = False
        for (rank, group), queue in queues.items():
            other = queues.get((queue[0].peer, group)) if queue else None
            if not other or (other[0].peer, other[0].sends) != (rank, not queue[0].sends):
                continue
            pair = queue[0], other[0]
            if all(before.done for transfer in pair for before in transfer.waited):
                del queue[0], other[0]
                pair[0].done = pair[1].done = moved = True
    return not any(queues.values())


def run(monkeypatch, schedule, routes, channel_groups):
    """What every rank posts in a step, through the given channels."""
    wire = Wire()
    monkeypatch.setattr(dist, "isend", wire.isend)
    monkeypatch.setattr(dist, "irecv", wire.irecv)
    everyone = list(range(len(schedule.ranks)))
    for rank, actions in enumerate(schedule.ranks):
        wire.rank, wire.waited = rank, []
        channels = P2PChannels(rank, channel_groups, everyone, torch.device("cpu"))
        incoming = list_incoming(schedule.ranks, schedule, routes, rank)
        channels.begin(incoming, list_reads(actions, incoming, routes), {})
        for action in actions:
            for message in messages_received_by(action, routes):
                sender = schedule.rank_of(message.sending_stage, action.microbatch)
                if sender != rank:
                    channels.receive(message, sender)
            for message in messages_sent_by(action, routes):
                receiver = schedule.rank_of(message.receiving_stage, action.microbatch)
                if receiver != rank:
                    channels.send(message, receiver, [torch.zeros(1)])
    return wire


def build_routes(stages, *, skips):
    chain = [TensorRoute(stage, stage + 1, (SPEC,)) for stage in range(stages - 1)]
    return TensorRoutes([*chain, TensorRoute(0, stages - 1, (SPEC,))] if skips else chain, stages)


class Made(ProcessGroups):
    """Notes which groups are asked for."""

    def __init__(self, rank):
        self.rank, self.made = rank, itertools.count()

    def create_group_of_all(self, backend=None):
        return f"everyone {next(self.made)}"

    def create_groups(self, wanted):
        (ranks,) = wanted
        name = f"{ranks} {next(self.made)}"
        return {ranks: name} if self.rank in ranks else {}


def all_channels(pairs, ranks):
    """Those of every rank together."""
    found = {}
    for rank in range(ranks):
        for pair, group in make_channel_groups(Made(rank), pairs).items():
            assert found.setdefault(pair, group) == group
    return found


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize(("name", "stages", "microbatches", "chunks"), CELLS)
def test_a_channel_per_pair_always_finishes(monkeypatch, name, stages, microbatches, chunks, skips):
    monkeypatch.setattr(p2p, "is_bound_to_devices", lambda: True)
    schedule = make_schedule(name, stages, microbatches, chunks=chunks)
    routes = build_routes(stages, skips=skips)
    pairs = find_connected_pairs(schedule.ranks, schedule, routes)
    found = all_channels(pairs, len(schedule.ranks))
    assert len(set(found.values())) == len(pairs)
    assert finishes(run(monkeypatch, schedule, routes, found))


@pytest.mark.parametrize(("name", "stages", "microbatches", "chunks"), STUCK_IN_TWO)
def test_two_groups_would_not(monkeypatch, name, stages, microbatches, chunks):
    monkeypatch.setattr(p2p, "is_bound_to_devices", lambda: False)
    schedule = make_schedule(name, stages, microbatches, chunks=chunks)
    routes = build_routes(stages, skips=False)
    found = all_channels(
        find_connected_pairs(schedule.ranks, schedule, routes), len(schedule.ranks)
    )
    assert len(set(found.values())) == 2
    assert not finishes(run(monkeypatch, schedule, routes, found))


POSTED = [
    ("gpipe", (1, 1, 1), 1), ("1f1b", (1, 1, 1), 1), ("1f1b", (4, 1, 2), 1), ("1f1b", (1, 3), 1),
    ("interleaved_1f1b", (1,) * 8, 2), ("looped_bfs", (1,) * 4, 2), ("zero_bubble", (1,) * 4, 1),
    ("interleaved_zero_bubble", (1,) * 8, 2), ("zbv", (1,) * 8, 2), ("dualpipev", (1,) * 8, 2),
]  # fmt: skip


@pytest.mark.parametrize("microbatches", [16, 64])
@pytest.mark.parametrize(("name", "replicas", "chunks"), POSTED)
def test_as_many_receives_are_posted_as_plans_count(
    monkeypatch, name, replicas, chunks, microbatches
):
    """Two for each channel were posted, so a stage behind four replicas had eight."""
    schedule = make_schedule(
        name, len(replicas), microbatches, replicas=replicas if chunks == 1 else (), chunks=chunks
    )
    routes = build_routes(len(replicas), skips=False)
    pairs = find_connected_pairs(schedule.ranks, schedule, routes)
    most = {}

    def receive(tensor, peer, group):
        held = [ref for ref in wire.buffers if ref() is not None]
        wire.buffers = [*held, weakref.ref(tensor)]
        return wire.post(tensor, peer, group)

    for rank, actions in enumerate(schedule.ranks):
        wire = Wire()
        wire.rank, wire.buffers, wire.post = rank, [], wire.irecv
        monkeypatch.setattr(dist, "isend", wire.isend)
        monkeypatch.setattr(dist, "irecv", receive)
        groups = dict.fromkeys(pairs, "everyone")
        channels = P2PChannels(rank, groups, list(range(len(schedule.ranks))), torch.device("cpu"))
        incoming = list_incoming(schedule.ranks, schedule, routes, rank)
        channels.begin(incoming, list_reads(actions, incoming, routes), {})
        for action in actions:
            for message in messages_received_by(action, routes):
                sender = schedule.rank_of(message.sending_stage, action.microbatch)
                if sender != rank:
                    channels.receive(message, sender)  # let go of at once
                    alive = sum(ref() is not None for ref in wire.buffers)
                    most[rank] = max(most.get(rank, 0), alive)
    for rank, found in most.items():
        incoming = list_incoming(schedule.ranks, schedule, routes, rank)
        counted = POSTED_AHEAD * len({m.flow for messages in incoming for m in messages})
        # A channel of several chunks delivers theirs in turn: not all are waited for at once.
        assert found == counted if chunks == 1 else found <= counted


class CompleteWhenTaken:
    """A send of gloo's: it never says that it is complete, and waiting must not block."""

    def __init__(self, taken):
        self._taken = taken

    def is_completed(self):
        return False

    def wait(self):
        assert self._taken(), "waited for a message that nobody has read"


@pytest.mark.parametrize(("name", "replicas", "chunks"), POSTED)
def test_sends_are_let_go_when_an_answer_shows_that_they_were_read(
    monkeypatch, name, replicas, chunks
):
    """On gloo every message was kept until the end of the step."""
    count = 64
    schedule = make_schedule(
        name, len(replicas), count, replicas=replicas if chunks == 1 else (), chunks=chunks
    )
    routes = build_routes(len(replicas), skips=False)
    size = len(schedule.ranks)
    pairs = dict.fromkeys(find_connected_pairs(schedule.ranks, schedule, routes), "everyone")
    read, kept = set(), {}
    monkeypatch.setattr(dist, "irecv", lambda *args, **kwargs: None)
    channels, waiting = [], []
    for rank, actions in enumerate(schedule.ranks):
        channel = P2PChannels(rank, pairs, list(range(size)), torch.device("cpu"))
        incoming = list_incoming(schedule.ranks, schedule, routes, rank)
        channel.begin(
            incoming,
            list_reads(actions, incoming, routes),
            list_acknowledged(schedule.ranks, schedule, routes, rank),
        )
        channels.append(channel)
        waiting.append(list(actions))
    sent = set()
    while any(waiting):
        for rank, actions in enumerate(waiting):
            if not actions:
                continue
            needed = [
                (m, schedule.rank_of(m.sending_stage, m.microbatch))
                for m in messages_received_by(actions[0], routes)
            ]
            if any(sender != rank and m not in sent for m, sender in needed):
                continue
            action = actions.pop(0)
            for message, sender in needed:
                if sender != rank:
                    read.add(message)
                    channels[rank].receive(message, sender)
            for message in messages_sent_by(action, routes):
                receiver = schedule.rank_of(message.receiving_stage, message.microbatch)
                if receiver != rank:
                    work = CompleteWhenTaken(lambda message=message: message in read)
                    monkeypatch.setattr(dist, "isend", lambda *args, work=work, **kwargs: work)
                    channels[rank].send(message, receiver, [torch.zeros(1)])
                    sent.add(message)
            kept[rank] = max(kept.get(rank, 0), len(channels[rank]._sending))
    # Nothing comes back before all forwards of GPipe's kind are done.
    assert max(kept.values()) <= (count if name in ("gpipe", "looped_bfs") else 11)


@pytest.mark.parametrize("queues", [False, True])
def test_sends_are_let_go_by_what_arrives_only_where_the_host_waits(monkeypatch, queues):
    """The emulation of NCCL did it too; a rank behind one that hung did not end."""
    if queues:
        monkeypatch.setattr(device_placement, "QUEUEING", {"cuda", "cpu"})
    channels, said = P2PChannels(0, {}, [0], torch.device("cpu")), {object(): []}
    channels.begin([], [], said)
    assert channels._acknowledged == ({} if queues else said)
