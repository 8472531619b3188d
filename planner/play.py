"""Play an order of work and see when everything happens.

Start of an action: when its rank has done what comes before it and the results it reads have
arrived. A forward reads the forward of the stage before, a backward (or its input part) that of
the stage behind and its own forward, a weight part its input part. A recomputation waits for what
its backward waits for: it counts as the first part of it.

A result that goes to another rank is sent when it is made and the message before it on the same
channel has gone through; the computation goes on meanwhile. Each rank has a channel towards the
next stages and one towards the previous. Where boundaries share a channel, messages go in the
order in which they are made, of several at the same moment that of the lowest rank first.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ..core.errors import InvalidInput
from ..schedules.jit import Kernel
from ..schedules.order import BACKWARD_INPUT, BACKWARD_WEIGHT, Ints, Order
from .stage_times import StageTimes

Floats = NDArray[np.float64]

ROUNDING = 1e-12
"""Less idle share than this is the rounding of a sum of many durations."""


@dataclass(frozen=True)
class Played:
    """When everything happens.

    Attributes:
        step_time_s: From the first action to the last, gradient synchronisation included.
        start_s: Of each action of the order.
        end_s: Of each action.
        sent_s: When each action's message starts; -1 where there is none.
        done_s: When each stage has done its last action.
        last_end_s: When everything but the sum over tied weights is done.
    """

    step_time_s: float
    start_s: Floats
    end_s: Floats
    sent_s: Floats
    done_s: Floats
    last_end_s: float


def play(order: Order, times: StageTimes) -> Played:
    """Everything that happens in one step.

    O(actions); with shared channels O(actions log ranks).

    Raises:
        InvalidInput: The durations do not fit the order, or it can never finish: the message
            says what each rank waits for.
    """
    times.check(order.num_stages)
    stages, ranks, actions = order.num_stages, order.num_ranks, len(order.stage)
    results = 2 * stages * order.num_microbatches
    duration_s = durations(times)
    send_s, channel, num_channels = _messages(times)
    holders = np.array([rank for each in order.stage_ranks for rank in each], np.int64)
    first_holder = np.array([0, *accumulate(map(len, order.stage_ranks))], np.int64)
    start_s, end_s, sent_s = np.zeros(actions), np.zeros(actions), np.full(actions, -1.0)
    done_s, at = np.zeros(stages), order.first[:-1].copy()
    arrived_s, waiting = np.full(results, -1.0), np.full(results, -1)
    _play(
        actions,
        order.first, order.stage, order.work, order.microbatch, order.num_microbatches,
        first_holder, holders, duration_s, send_s, channel, num_channels > 0,
        start_s, end_s, sent_s, done_s, at, arrived_s, waiting,
        np.zeros(ranks), np.zeros(2 * ranks + num_channels), np.arange(ranks)[::-1].copy(),
    )  # fmt: skip
    if (at != order.first[1:]).any():
        raise InvalidInput(f"the schedule never finishes: {_stuck(order, at, arrived_s, waiting)}")
    synced_s = done_s
    if len(times.sync_s) and order.trains:
        synced_s = done_s + np.asarray(times.sync_s, np.float64)
    last_end_s = float(synced_s.max())
    step_time_s = last_end_s + times.tied_sync_s
    return Played(step_time_s, start_s, end_s, sent_s, done_s, last_end_s)


def bubble_fraction(counts: Ints, times: StageTimes, step_time_s: float, num_ranks: int) -> float:
    """Share of all ranks' time in which they neither compute forward nor backward.

    Args:
        counts: See `Order`.
        times: Of the same stages.
        step_time_s: Of the whole step.
        num_ranks: All of them.
    """
    busy_s = math.fsum((counts * durations(times)).tolist())
    capacity_s = step_time_s * num_ranks
    idle = 1 - busy_s / capacity_s if capacity_s else 0.0
    return idle if idle > ROUNDING else 0.0


def durations(times: StageTimes) -> Floats:
    """Of F, B, I, W and R of every stage, one work after the other."""
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


def _messages(times: StageTimes) -> tuple[Floats, Ints, int]:
    """Durations and shared channels by direction and sending stage, and the number of channels."""
    stages = times.num_stages
    send_s, channel = np.zeros((2, stages)), np.full((2, stages), -1)
    if len(times.send_forward_s):
        send_s[0, :-1] = times.send_forward_s
    if len(times.send_backward_s):
        send_s[1, 1:] = times.send_backward_s
    if not times.shares_channels:
        return send_s.ravel(), channel.ravel(), 0
    if len(times.forward_channel):
        channel[0, :-1] = times.forward_channel
    if len(times.backward_channel):
        channel[1, 1:] = times.backward_channel
    shared = np.unique(channel[channel >= 0])
    channel = np.where(channel >= 0, np.searchsorted(shared, channel), -1)
    return send_s.ravel(), channel.ravel(), len(shared)


def _stuck(order: Order, at: Ints, arrived_s: Floats, waiting: Ints) -> str:
    """What each rank that did not finish waits for."""
    wanted = {int(waiting[result]): int(result)
              for result in np.flatnonzero((waiting >= 0) & (arrived_s < 0))}  # fmt: skip
    split = order.work == BACKWARD_INPUT
    parted = set(zip(order.stage[split].tolist(), order.microbatch[split].tolist(), strict=True))
    lines = []
    for rank in np.flatnonzero(at < order.first[1:]).tolist():
        action = at[rank]
        stage, microbatch = order.stage[action], order.microbatch[action]
        letter = "I" if order.work[action] == BACKWARD_WEIGHT else "F"
        if rank in wanted:
            behind, microbatch = divmod(wanted[rank], order.num_microbatches)
            stage = behind % order.num_stages
            backward = "I" if (stage, microbatch) in parted else "B"
            letter = "F" if behind < order.num_stages else backward
        lines.append(f"rank {rank} waits for {stage}{letter}{microbatch}")
    return "; ".join(lines)


@Kernel
def _play(
    first: Ints,
    stage: Ints,
    work: Ints,
    microbatch: Ints,
    num_microbatches: int,
    first_holder: Ints,
    holders: Ints,
    duration_s: Floats,
    send_s: Floats,
    channel: Ints,
    in_time_order: bool,
    start_s: Floats,
    end_s: Floats,
    sent_s: Floats,
    done_s: Floats,
    at: Ints,
    arrived_s: Floats,
    waiting: Ints,
    free_s: Floats,
    channel_free_s: Floats,
    ready: Ints,
) -> None:
    """Start what can start, finish it, and see whom that sets free.

    A rank on the ``ready`` stack is taken off and starts its next action. If that wants a result
    nobody has made yet, the rank is left ``waiting`` for it and put back when it is made. An
    action is finished, and its message sent, as soon as it has started: no other rank uses the
    channel. With shared channels actions finish in order of time instead, from a heap of those
    at work. Each action is started once and waited for at most once.

    Args:
        first: See `Order`.
        stage: See `Order`.
        work: See `Order`.
        microbatch: See `Order`.
        num_microbatches: See `Order`.
        first_holder: Stage s is on the ranks ``holders[first_holder[s] : first_holder[s + 1]]``.
        holders: Ranks of one stage after the other.
        duration_s: By work and stage.
        send_s: By direction (0 forward) and sending stage.
        channel: Shared channels, likewise; -1 for one of the rank's own.
        in_time_order: Whether there are shared channels.
        start_s: Out: of each action.
        end_s: Out: of each action.
        done_s: Out: when each stage has done its last action.
        sent_s: Out: start of each action's message; -1 stays where there is none.
        at: In: each rank's first action. Out: the first it did not do.
        arrived_s: By (whether backward, stage, micro-batch), where the result is wanted; -1.
        waiting: The rank that waits for that result; -1.
        free_s: By rank; zeros.
        channel_free_s: By rank and direction, then by shared channel; zeros.
        ready: All ranks, the first to start last.
    """
    num_stages, num_ranks = len(first_holder) - 1, len(first) - 1
    num_ready = num_ranks
    running = [(0.0, 0)]
    running.pop()
    while True:
        if num_ready > 0:
            num_ready -= 1
            rank = ready[num_ready]
            action = at[rank]
            if action == first[rank + 1]:
                continue
            s, k, what = stage[action], microbatch[action], work[action]
            own, other = -1, -1  # results it reads, made by this rank and by another
            if what == 0:
                if s > 0:
                    other = (s - 1) * num_microbatches + k
            elif what == 3:
                own = (num_stages + s) * num_microbatches + k
            else:
                own = s * num_microbatches + k
                if s + 1 < num_stages:
                    other = (num_stages + s + 1) * num_microbatches + k
            if own >= 0 and arrived_s[own] < 0:
                continue  # it stands before what it reads: for ever
            start = free_s[rank]
            if other >= 0:
                if arrived_s[other] < 0:
                    waiting[other] = rank
                    continue
                start = max(start, arrived_s[other])
            start_s[action] = start
            end = start + duration_s[what * num_stages + s]
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
        if what < 3:
            backward = 0 if what == 0 else 1
            arrived = end
            target = s - 1 if backward else s + 1
            if 0 <= target < num_stages:
                send = send_s[backward * num_stages + s]
                holder = first_holder[target]
                replicas = first_holder[target + 1] - holder
                if replicas > 1:
                    holder += k % replicas
                if send > 0 and holders[holder] != rank:
                    way = channel[backward * num_stages + s]
                    way = 2 * rank + backward if way < 0 else 2 * num_ranks + way
                    sent_s[action] = max(end, channel_free_s[way])
                    arrived = sent_s[action] + send
                    channel_free_s[way] = arrived
            result = (backward * num_stages + s) * num_microbatches + k
            arrived_s[result] = arrived
            if waiting[result] >= 0:
                ready[num_ready] = waiting[result]
                num_ready += 1
        ready[num_ready] = rank
        num_ready += 1
