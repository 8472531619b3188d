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
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ...core.errors import InvalidInput
from ...schedules.action_order import BACKWARD_INPUT, BACKWARD_WEIGHT, ActionOrder, Ints
from ...schedules.numba_jit import Kernel
from .durations import StageTimes, StepMessages

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

    O(actions); with shared channels O(actions log ranks).

    Raises:
        InvalidInput: The durations do not fit the order, or it can never finish: the message
            says what each rank waits for.
    """
    times.check(order.num_stages)
    stages, ranks, actions = order.num_stages, order.num_ranks, len(order.stage)
    messages = StepMessages.of(times)
    results = len(messages.send_s) * order.num_microbatches
    holders = np.array([rank for each in order.stage_ranks for rank in each], np.int64)
    first_holder = np.array([0, *accumulate(map(len, order.stage_ranks))], np.int64)
    start_s, end_s, sent_s = np.zeros(actions), np.zeros(actions), np.full(results, -1.0)
    done_s, at = np.zeros(stages), order.first[:-1].copy()
    waiting = np.full(results, -1)
    _run_events(
        actions,
        order.first, order.stage, order.work, order.microbatch, order.num_microbatches,
        first_holder, holders, durations(times),
        messages.reader, messages.send_s, messages.channel, messages.first_made,
        messages.read, messages.first_read, messages.num_channels > 0,
        start_s, end_s, sent_s, done_s, at,
        np.zeros(2 * stages * order.num_microbatches, np.bool_), np.full(results, -1.0), waiting,
        np.zeros(ranks), np.zeros(2 * ranks + messages.num_channels),
        np.arange(ranks)[::-1].copy(),
    )  # fmt: skip
    if (at != order.first[1:]).any():
        raise InvalidInput(f"the schedule never finishes: {_stuck(order, messages, at, waiting)}")
    synced_s = done_s
    if len(times.sync_s) and order.trains:
        synced_s = done_s + np.asarray(times.sync_s, np.float64)
    last_end_s = float(synced_s.max())
    step_time_s = last_end_s + times.tied_sync_s
    return SimulatedStep(step_time_s, start_s, end_s, messages, sent_s, done_s, last_end_s)


def bubble_fraction(counts: Ints, times: StageTimes, step_time_s: float, num_ranks: int) -> float:
    """Return the share of all ranks' time in which they compute neither forward nor backward.

    Args:
        counts: See `ActionOrder`.
        times: Of the same stages.
        step_time_s: Of the whole step.
        num_ranks: All of them.
    """
    busy_s = math.fsum((counts * durations(times)).tolist())
    capacity_s = step_time_s * num_ranks
    idle = 1 - busy_s / capacity_s if capacity_s else 0.0
    return idle if idle > ROUNDING else 0.0


def durations(times: StageTimes) -> Floats:
    """Return the durations of F, B, I, W and R of every stage, kind by kind."""
    whole = np.asarray(times.backward_s, np.float64)
    first, second = whole / 2, whole / 2
    if len(times.backward_input_s):
        first = np.asarray(times.backward_input_s, np.float64)
        second = np.asarray(times.backward_weight_s, np.float64)
    again = np.zeros_like(whole)
    if len(times.recompute_s):
        again = np.asarray(times.recompute_s, np.float64)
    forward = np.asarray(times.forward_s, np.float64)
    return np.concatenate((forward, whole - again, first - again, second, again))


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


# Arguments of the kernel, beyond the fields of `ActionOrder` and `StepMessages`:
#
# first_holder     stage s is on the ranks holders[first_holder[s] : first_holder[s + 1]]
# holders          ranks of one stage after the other
# duration_s       by kind of work and stage
# in_time_order    True if there are shared channels
# start_s, end_s   out: by action
# sent_s           out: by message and micro-batch, when it is sent; -1 stays where none is
# done_s           out: when each stage has finished its last action
# at               in: each rank's first action; out: the first one it did not execute
# made             by (backward or not, stage, micro-batch), True once the result exists
# arrived_s        by message and micro-batch, when its reader has it; -1 before
# waiting          the rank that waits for this message and micro-batch; -1 for none
# free_s           by rank, when it finishes its current action
# channel_free_s   by rank and direction, then by shared channel
# ready            a stack of ranks that may start their next action
#
# The loop is one function on purpose: with the search for an action's start and the sending of its
# results in functions of their own, compiled by numba, a step of 64 stages took 6.4 ms, not 2.7 ms.


@Kernel
def _run_events(
    first: Ints, stage: Ints, work: Ints, microbatch: Ints, num_microbatches: int,
    first_holder: Ints, holders: Ints, duration_s: Floats,
    reader: Ints, send_s: Floats, channel: Ints, first_made: Ints, read: Ints, first_read: Ints,
    in_time_order: bool,
    start_s: Floats, end_s: Floats, sent_s: Floats, done_s: Floats, at: Ints,
    made: NDArray[np.bool_], arrived_s: Floats, waiting: Ints,
    free_s: Floats, channel_free_s: Floats, ready: Ints,
) -> None:  # fmt: skip
    """Execute every action as early as its inputs and its rank allow.

    A rank taken off the ``ready`` stack starts its next action. If a result it reads does not
    exist yet, the rank waits for that result and returns to the stack once it is made. Each action
    is started once and waited for at most once.
    """
    num_stages, num_ranks = len(first_holder) - 1, len(first) - 1
    num_ready = num_ranks
    running = [(0.0, 0)]  # numba infers the type of the heap's entries from this one
    running.pop()
    while True:
        if num_ready > 0:
            num_ready -= 1
            rank = ready[num_ready]
            action = at[rank]
            if action == first[rank + 1]:
                continue
            s, k, what = stage[action], microbatch[action], work[action]
            backward = 0 if what == 0 else 1
            own = -1  # the result it reads that its own rank makes
            if what == 3:
                own = (num_stages + s) * num_microbatches + k
            elif backward == 1:
                own = s * num_microbatches + k
            if own >= 0 and not made[own]:
                continue  # its own rank would make the result later: a deadlock
            start = free_s[rank]
            missing = -1
            if what != 3:
                way = backward * num_stages + s
                for place in range(first_read[way], first_read[way + 1]):
                    result = read[place] * num_microbatches + k
                    if arrived_s[result] < 0:
                        missing = result
                        break
                    start = max(start, arrived_s[result])
            if missing >= 0:
                waiting[missing] = rank
                continue
            start_s[action] = start
            end = start + duration_s[what * num_stages + s]
            # On the rank's own channels nobody else sends, so the action can finish at once. On
            # shared channels the order of sends matters: actions finish in order of time, and ties
            # go to the lowest rank.
            if in_time_order:
                heapq.heappush(running, (end, rank))
                continue
        elif len(running) > 0:
            end, rank = heapq.heappop(running)
            action = at[rank]
            s, k, what = stage[action], microbatch[action], work[action]
        else:
            break
        at[rank] += 1
        free_s[rank] = end
        end_s[action] = end
        done_s[s] = max(done_s[s], end)
        if what < 3:  # F, B and I make results; W and R make none
            backward = 0 if what == 0 else 1
            way = backward * num_stages + s
            made[way * num_microbatches + k] = True
            for message in range(first_made[way], first_made[way + 1]):
                arrived = end
                target = reader[message]
                holder = first_holder[target]
                replicas = first_holder[target + 1] - holder
                if replicas > 1:
                    holder += k % replicas  # micro-batches are dealt to replicas in turn
                result = message * num_microbatches + k
                if send_s[message] > 0 and holders[holder] != rank:
                    line = channel[message]
                    line = 2 * rank + backward if line < 0 else 2 * num_ranks + line
                    sent_s[result] = max(end, channel_free_s[line])
                    arrived = sent_s[result] + send_s[message]
                    channel_free_s[line] = arrived
                arrived_s[result] = arrived
                if waiting[result] >= 0:
                    ready[num_ready] = waiting[result]
                    waiting[result] = -1
                    num_ready += 1
        ready[num_ready] = rank
        num_ready += 1
