"""The event loop that executes an action order on given durations.

Start of an action: when its rank has done what comes before it and the results it reads have
arrived. A forward reads the forward of the stage before, a backward (or its input part) that of
the stage behind and its own forward, a weight part its input part; both also read what is sent
past stages. A recomputation waits for what its backward waits for: it counts as the first part of
it.

A result that goes to another rank is sent when it is made and the message before it on the same
channel has gone through; the computation goes on meanwhile. Each rank has a channel towards the
next stages and one towards the previous; what one action makes for several stages goes to the
nearest first. Where boundaries share a channel, messages go in the
order in which they are made, of several at the same moment that of the lowest rank first.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.errors import InvalidInput
from ...schedules.action_order import BACKWARD_INPUT, BACKWARD_WEIGHT, WORKS, ActionOrder, Ints
from ...schedules.numba_jit import Kernel
from .durations import StageTimes, StepMessages, list_neighbours

Floats = NDArray[np.float64]

ROUNDING = 1e-12
"""Less idle share than this is the rounding of a sum of many durations."""


@dataclass(frozen=True)
class SimulatedStep:
    """The times of every action and message of a simulated step.

    Attributes:
        step_time_s: From the first action to the last, gradient synchronisation included.
        start_s: Of each action of the order.
        end_s: Of each action.
        messages: Those of one micro-batch.
        sent_s: When each starts, by message and micro-batch; -1 where nothing is sent.
        done_s: When each stage has done its last action.
        last_end_s: When everything but the sum over tied weights is done.
    """

    step_time_s: float
    start_s: Floats
    end_s: Floats
    messages: StepMessages
    sent_s: Floats
    done_s: Floats
    last_end_s: float

    def sends(
        self, stage: int, microbatch: int, *, backward: bool
    ) -> Iterator[tuple[float, float]]:
        """Yield start and duration of each message that a stage's forward or backward sends."""
        num_microbatches = len(self.sent_s) // max(1, len(self.messages.send_s))
        way = backward * len(self.done_s) + stage
        first, last = self.messages.first_made[way : way + 2].tolist()
        for message in range(first, last):
            sent_s = float(self.sent_s[message * num_microbatches + microbatch])
            if sent_s >= 0:
                yield sent_s, float(self.messages.send_s[message])


def simulate_step(order: ActionOrder, times: StageTimes) -> SimulatedStep:
    """Simulate one step.

    O(actions); with shared channels O(actions log ranks). The error of an order that can never
    finish says what each rank waits for.
    """
    times.check(order.num_stages)
    messages = StepMessages.of(times)
    holders, first_holder = order.holders
    state = _run_events(
        len(order.stage),
        Actions(
            first=order.first,
            kind=order.kinds,
            microbatch=order.microbatch,
            num_microbatches=order.num_microbatches,
            first_holder=first_holder,
            holders=holders,
        ),
        _list_kinds(order, times, messages),
        messages,
        _make_state(order, messages),
    )
    start_s, end_s, sent_s, done_s, at, waiting = (np.asarray(column) for column in state[:6])
    if (at != order.first[1:]).any():
        raise InvalidInput(f"the schedule never finishes: {_stuck(order, messages, at, waiting)}")
    done_s = done_s.reshape(len(WORKS), -1).max(axis=0)
    synced_s = done_s
    if len(times.sync_s) and order.trains:
        synced_s = done_s + np.asarray(times.sync_s, np.float64)
    last_end_s = float(synced_s.max())
    step_time_s = last_end_s + times.tied_sync_s
    return SimulatedStep(step_time_s, start_s, end_s, messages, sent_s, done_s, last_end_s)


def bubble_fraction(counts: Ints, times: StageTimes, step_time_s: float, num_ranks: int) -> float:
    """Return the share of all ranks' time in which they compute neither forward nor backward."""
    busy_s = math.fsum((counts * times.work_s).tolist())
    capacity_s = step_time_s * num_ranks
    idle = 1 - busy_s / capacity_s if capacity_s else 0.0
    return idle if idle > ROUNDING else 0.0


def _stuck(order: ActionOrder, messages: StepMessages, at: Ints, waiting: Ints) -> str:
    """Describe the action each unfinished rank waits for."""
    wanted = {int(waiting[result]): int(result) for result in np.flatnonzero(waiting >= 0)}
    split = order.work == BACKWARD_INPUT
    parted = set(zip(order.stage[split].tolist(), order.microbatch[split].tolist(), strict=True))
    lines = []
    for rank in np.flatnonzero(at < order.first[1:]).tolist():
        action = at[rank]
        stage, microbatch = int(order.stage[action]), int(order.microbatch[action])
        letter = "I" if order.work[action] == BACKWARD_WEIGHT else "F"
        if rank in wanted:
            message, microbatch = divmod(wanted[rank], order.num_microbatches)
            stage = int(messages.maker[message])
            backward = "I" if (stage, microbatch) in parted else "B"
            letter = "F" if stage < messages.reader[message] else backward
        lines.append(f"rank {rank} waits for {stage}{letter}{microbatch}")
    return "; ".join(lines)


class Actions(NamedTuple):
    """The actions of each rank in order, and who holds which stage.

    Attributes:
        first: Of each rank; see `ActionOrder`.
        kind: Work and stage of each action, ``work * stages + stage``.
        microbatch: Of each action.
        num_microbatches: Micro-batches per step.
        first_holder: Stage s is on the ranks ``holders[first_holder[s] : first_holder[s + 1]]``.
        holders: The ranks of one stage after the other.
    """

    first: Ints
    kind: Ints
    microbatch: Ints
    num_microbatches: int
    first_holder: Ints
    holders: Ints


class Kinds(NamedTuple):
    """Tables by kind of action: its duration, what it reads and what it makes.

    Results are numbered by direction (forwards first), stage and micro-batch. Numbers beyond the
    last result mean "none": no message belongs to them, and they count as made.

    Attributes:
        duration_s: In seconds.
        first_read: It reads the entries from here to ``last_read`` of `StepMessages.read`.
        last_read: See ``first_read``.
        needs: The result it reads of its own rank, of micro-batch 0.
        makes: Its own result, of micro-batch 0.
        first_made: It sends the messages from here to ``last_made``.
        last_made: See ``first_made``.
    """

    duration_s: Floats
    first_read: Ints
    last_read: Ints
    needs: Ints
    makes: Ints
    first_made: Ints
    last_made: Ints


class State(NamedTuple):
    """The progress of a simulated step.

    Attributes:
        start_s: By action.
        end_s: By action.
        sent_s: When each message of each micro-batch is sent; -1 where none is.
        done_s: When the last action so far of each kind has finished.
        at: The first action that each rank has not executed.
        waiting: The rank that waits for this message and micro-batch; -1 for none.
        made: By result, True once it exists.
        arrived_s: By message and micro-batch, when its reader has it; -1 before.
        free_s: When each rank finishes its current action.
        channel_free_s: By shared channel, then by rank and direction.
        ready: A stack of ranks that may start their next action.
    """

    start_s: Floats
    end_s: Floats
    sent_s: Floats
    done_s: Floats
    at: Ints
    waiting: Ints
    made: NDArray[np.bool_]
    arrived_s: Floats
    free_s: Floats
    channel_free_s: Floats
    ready: Ints


def _list_kinds(order: ActionOrder, times: StageTimes, messages: StepMessages) -> Kinds:
    if times.skips:
        kinds = _kinds_of(order.num_stages, order.num_microbatches, messages)
    else:
        kinds = _kinds_between_neighbours(order.num_stages, order.num_microbatches)
    return kinds._replace(duration_s=times.work_s)


@lru_cache(maxsize=256)
def _kinds_between_neighbours(stages: int, num_microbatches: int) -> Kinds:
    return _kinds_of(stages, num_microbatches, list_neighbours(stages))


def _kinds_of(stages: int, num_microbatches: int, messages: StepMessages) -> Kinds:
    """Return the kinds of actions, which take no time yet."""
    reads, needs, makes = _list_results(stages)
    first_read, first_made = messages.first_read, messages.first_made
    return Kinds(
        duration_s=np.zeros(len(reads)),
        first_read=first_read[reads],
        last_read=first_read[reads + 1],
        needs=needs * num_microbatches,
        makes=makes * num_microbatches,
        first_made=first_made[makes],
        last_made=first_made[makes + 1],
    )


def _list_results(stages: int) -> tuple[Ints, Ints, Ints]:
    """Return what each kind of action reads of others, needs of its own rank, and makes."""
    forward = np.arange(stages)
    backward, none = forward + stages, np.full(stages, 2 * stages)
    # in the order of `WORKS`: F, B, I, W and R; F, B and I make results, W and R make none
    reads = np.concatenate((forward, backward, backward, none, backward))
    needs = np.concatenate((none, forward, forward, backward, forward))
    makes = np.concatenate((forward, backward, backward, none, none))
    return reads, needs, makes


def _make_state(order: ActionOrder, messages: StepMessages) -> State:
    stages, ranks, actions = order.num_stages, order.num_ranks, len(order.stage)
    results = len(messages.send_s) * order.num_microbatches
    made = np.zeros((2 * stages + 1) * order.num_microbatches, np.bool_)
    made[2 * stages * order.num_microbatches :] = True
    return State(
        start_s=np.zeros(actions),
        end_s=np.zeros(actions),
        sent_s=np.full(results, -1.0),
        done_s=np.zeros(len(WORKS) * stages),
        at=order.first[:-1].copy(),
        waiting=np.full(results, -1),
        made=made,
        arrived_s=np.full(results, -1.0),
        free_s=np.zeros(ranks),
        channel_free_s=np.zeros(messages.num_channels + 2 * ranks),
        ready=np.arange(ranks)[::-1].copy(),
    )


def _choose_holder(actions: Actions, stage: int, microbatch: int) -> int:
    """Return the rank that computes a stage on a micro-batch."""
    holder = actions.first_holder[stage]
    replicas = actions.first_holder[stage + 1] - holder
    if replicas > 1:
        holder += microbatch % replicas  # micro-batches are dealt to replicas in turn
    rank: int = actions.holders[holder]
    return rank


# The loop is one function on purpose: an action takes 20 ns compiled and 2 us as plain Python.
# Split in three, a step of 64 stages x 512 micro-batches took 6.4 ms compiled, not 2.7 ms. Choosing
# the holder costs no time apart: as it returns a number, numba counts no references to its arrays.


@Kernel
def _run_events(actions: Actions, kinds: Kinds, messages: StepMessages, state: State) -> State:
    """Execute every action as early as its inputs and its rank allow."""
    first, kind_of, microbatch, m, _, _ = actions
    duration_s, first_read, last_read, needs, makes, first_made, last_made = kinds
    _, reader, send_s, channel, _, read, _, num_channels = messages
    start_s, end_s, sent_s, done_s, at, waiting, made, arrived_s, free_s, free_at, ready = state
    num_ready = len(ready)
    running = [(0.0, 0)][:0]  # empty; numba infers the type of the heap's entries
    while num_ready > 0 or len(running) > 0:
        if num_ready > 0:
            num_ready -= 1
            rank = ready[num_ready]
            action = at[rank]
            if action == first[rank + 1]:
                continue
            kind, k = kind_of[action], microbatch[action]
            if not made[needs[kind] + k]:
                continue  # its own rank would make the result later: a deadlock
            start = free_s[rank]
            for place in range(first_read[kind], last_read[kind]):
                result = read[place] * m + k
                if arrived_s[result] < 0:
                    waiting[result] = rank
                    start = -1.0  # none yet: the rank returns to the stack once this is made
                    break
                start = max(start, arrived_s[result])
            if start < 0:
                continue
            start_s[action] = start
            end = start + duration_s[kind]
            # On its own channels a rank is the only sender: the action can finish at once. On
            # shared ones the order of sends matters: in order of time, ties to the lowest rank.
            if num_channels > 0:
                heapq.heappush(running, (end, rank))
                continue
        else:
            end, rank = heapq.heappop(running)
            action = at[rank]
            kind, k = kind_of[action], microbatch[action]
        at[rank] = action + 1
        free_s[rank] = end
        end_s[action] = end
        done_s[kind] = max(done_s[kind], end)
        made[makes[kind] + k] = True
        for message in range(first_made[kind], last_made[kind]):
            result = message * m + k
            arrived_s[result] = end
            if send_s[message] > 0 and _choose_holder(actions, reader[message], k) != rank:
                line = channel[message] + (0 if channel[message] < num_channels else 2 * rank)
                sent_s[result] = max(end, free_at[line])
                free_at[line] = sent_s[result] + send_s[message]
                arrived_s[result] = free_at[line]
            if waiting[result] >= 0:
                ready[num_ready] = waiting[result]
                waiting[result] = -1
                num_ready += 1
        ready[num_ready] = rank
        num_ready += 1
    return state
