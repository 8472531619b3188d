"""Lower bounds on the simulated step of a plan, close to the step itself.

Notation, in this file alone: S stages with forward f, backward b and t = f + b; a cut sends for c
in both directions together; r replicas, n = ceil(m / r) micro-batches on the first of them, d of
them in flight. Up(s) is how long the first micro-batch takes to reach stage s, Down(s) how long a
gradient takes from it to the front, X(s) how long a micro-batch takes behind it, there and back.

**Intervals** (1F1B). From stage v to stage u >= v and back takes C = sum t + sum c. Stage u begins
the backward of micro-batch k after the forward of k + (d_u - 1) r_u, and stage v the forward of
k + d_v r_v after the backward of k: every D = d_v r_v - (d_u - 1) r_u micro-batches cost v a whole
C. So a step has a lead, until v forwards micro-batch (d_u - 1) r_u; as many turns of C as D fits
into the rest; and a tail. C / D is the interval mean: of one stage t / r, of longer ones more than
that where links are slow. A stage also waits X before its first backward and after its last
forward, whichever of both its own work does not cover.

**Channels.** Each direction of a cut carries one message of a rank at a time: n messages follow
each other, and what is in front and behind is not shortened by that.

**Flow shop** (GPipe). Forwards alone, then backwards: sum plus (n - 1) times the slowest forward
or send, plus the same of backwards.

Each is a chain of actions and messages that wait for each other, hence no step is shorter.
`benchmarks/step_brute_force.py` compares them with all plans of small problems.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...core.plan.schedule import ScheduleName
from ...schedules.traits import SPLIT_BACKWARD
from .durations import Floats

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class StageColumns:
    """P plans, or first stages of plans, with S stages each: arrays of shape (P, S).

    Attributes:
        forward_s: Per micro-batch.
        backward_s: Both parts, where the schedule splits it.
        there_s: Activations over the cut behind the stage; 0 behind the last one.
        back_s: Gradients over that cut.
        sync_s: Summing gradients over the replicas.
        replicas: Per stage.
        depth: Micro-batches in flight at one replica (1F1B), or forwards in front of its first
            backward.
        behind_s: Round trip of a micro-batch behind the last of these cuts, shape (P,); 0 for
            whole plans.
        turned: Replicas of the whole plan's last stage.
        weights_s: Part of ``backward_s`` that gradients do not wait for; 0 where it is not split.
    """

    forward_s: Floats
    backward_s: Floats
    there_s: Floats
    back_s: Floats
    sync_s: Floats
    replicas: Ints
    depth: Ints
    behind_s: Floats
    turned: int
    weights_s: Floats


def bound_steps(schedule: ScheduleName, num_microbatches: int, plans: StageColumns) -> Floats:
    """Return a lower bound on the simulated step of each plan, shape (P,)."""
    if schedule == "gpipe":
        return _bound_flow_shop(num_microbatches, plans)
    if schedule in ("1f1b", "zero_bubble"):
        return _bound_intervals(num_microbatches, plans, split=schedule in SPLIT_BACKWARD)
    raise ValueError(f"no bound for {schedule}")


def _before(values: Floats) -> Floats:
    """Return the sums of all entries in front of each one."""
    found: Floats = np.cumsum(values, axis=1) - values
    return found


def _next(values: Ints) -> Ints:
    """Return the entry behind each one; 1 behind the last."""
    return np.concatenate((values[:, 1:], np.ones_like(values[:, :1])), axis=1)


def _bound_flow_shop(m: int, plans: StageColumns) -> Floats:
    replicas, last = plans.replicas, plans.turned
    share = -(-m // replicas)
    # The chain turns back at the last stage's replica of some micro-batch, which need not be the
    # first one: of what follows there, each replica has at least these.
    returned = (m - last) // replicas + 1
    sends = np.maximum(plans.forward_s, plans.there_s)
    forwards = ((share - 1) * sends).max(axis=1)
    sent_back = np.maximum(
        (returned - 1) * plans.backward_s, (_next(returned) - 1) * plans.back_s
    ).max(axis=1)
    down = _before(plans.backward_s + plans.back_s)
    trip = plans.forward_s + plans.backward_s + plans.there_s + plans.back_s
    whole = trip.sum(axis=1) + plans.behind_s
    ended = np.maximum(down, plans.sync_s)
    summed = (whole + forwards)[:, None] - down + (returned - 1) * plans.backward_s + ended
    work = plans.forward_s + plans.backward_s
    busy = _before(plans.forward_s + plans.there_s) + share * work + ended
    found: Floats = np.maximum.reduce(
        [whole + forwards + sent_back, summed.max(axis=1), busy.max(axis=1)]
    )
    return found


def _bound_intervals(m: int, plans: StageColumns, *, split: bool) -> Floats:
    forward_s = plans.forward_s
    share = -(-m // plans.replicas)
    # Where the backward is split, gradients run back before the part of the weights is done.
    back_s = plans.backward_s - plans.weights_s
    work = forward_s + back_s
    up = _before(forward_s + plans.there_s)
    down = _before(back_s + plans.back_s)
    trip = work + plans.there_s + plans.back_s
    before = _before(trip)
    whole = before[:, -1] + trip[:, -1] + plans.behind_s
    behind = whole[:, None] - before - work
    ended = np.maximum(down, plans.sync_s)
    bounds = [
        (whole[:, None] - down + ended).max(axis=1),
        (up + share * (forward_s + plans.backward_s) + ended).max(axis=1)
        if not split
        else _bound_busy(plans, up, behind, share),
        whole
        + np.maximum((share - 1) * plans.there_s, (_next(share) - 1) * plans.back_s).max(axis=1),
        _bound_turns(m, plans, back_s, up, down, before, behind, ended),
    ]
    found: Floats = np.maximum.reduce(bounds)
    return found


def _bound_busy(plans: StageColumns, up: Floats, behind: Floats, share: Ints) -> Floats:
    """Bound by the work of each stage and its wait for the first gradient, backwards split.

    The weight parts of the last s + 1 micro-batches of stage s follow its last gradient, which
    runs to the first stage; there the part of one micro-batch is left.
    """
    forward_s, weights_s = plans.forward_s, plans.weights_s
    lead = np.maximum(plans.depth * forward_s, forward_s + behind)
    done = up + lead + share * (forward_s + plans.backward_s) - plans.depth * forward_s
    delayed = np.minimum(share, 1 + np.arange(share.shape[1])) * weights_s
    down = _before(plans.backward_s - weights_s + plans.back_s)
    sent = done - delayed + down + weights_s[:, :1]
    found: Floats = np.maximum(done + plans.sync_s, sent).max(axis=1)
    return found


def _bound_turns(
    m: int, plans: StageColumns, back_s: Floats, up: Floats, down: Floats, before: Floats,
    behind: Floats, ended: Floats,
) -> Floats:  # fmt: skip
    """Bound by the turns of every interval of stages, from v (axis 1) to u (axis 2)."""
    front, rear = (slice(None), slice(None), None), (slice(None), None, slice(None))
    forward_s, replicas, depth = plans.forward_s, plans.replicas, plans.depth
    round_s = (before + forward_s + back_s)[rear] - before[front]
    first = ((depth - 1) * replicas)[rear]
    step = (depth * replicas)[front] - first
    turns = (m - 1 - first) // np.maximum(step, 1)
    lead = (first // replicas[front]) * forward_s[front]
    # The last turn but one ends with the backward of micro-batch `turns` x `step` on stage v:
    # the backwards of the replica's others follow, or stage u's last forwards and what is behind.
    reached = turns * step
    follow = ((m - 1 - reached) // replicas[front]) * back_s[front] + ended[front]
    around = (
        ((m - 1 - first - reached) // replicas[rear]) * forward_s[rear] + behind[rear] + down[front]
    )
    waited = np.maximum(lead, behind[rear])
    # With a single turn its forward follows the lead alone, so both waits cannot add up.
    several = waited + np.maximum(follow, around)
    single = np.maximum(waited + follow, lead + around)
    bound = up[front] + (turns + 1) * round_s + np.where(turns > 0, several, single)
    stages = np.arange(forward_s.shape[1])
    is_interval = (stages[:, None] <= stages) & (step > 0) & (turns >= 0)
    found: Floats = np.where(is_interval, bound, 0.0).max(axis=(1, 2))
    return found
