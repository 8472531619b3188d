"""PipeDream's objective, known faults included, and the split that minimises it.

For comparison only: it says what PipeDream would have chosen and what it would have believed.
Source: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training",
SOSP 2019, and the optimizer published with it.

On one level M machines share links of B bytes/s. Choose nested states I_1 < ... < I_S, the last
of them everything, and replicas r_t that add up to exactly M, so that the largest of these is
least, in seconds per minibatch:

    first stage      (T_1 + 4 (r_1 - 1) W_1 / (B r_1) / L) / r_1
    stage t >= 2     (T_t + 4 (r_t - 1) W_t / (B r_t)) / r_t
    every t >= 2     2 a(I_{t-1}) / (B r_t) and, unless I_t is everything, 2 a(I_t) / (B r_t)

T are seconds of forward and backward, W parameter bytes, a(I) the bytes charged for a cut behind
I; L is 1 at the lowest level and the machines of the level below at others.
Behind each level T of a range becomes that level's optimum for it on all its machines.

Where this differs from what a pipeline does, and from our own objectives:

* the first stage is never charged for what it sends;
* transfers are compared with the work by max, not added to it;
* only the first stage's gradient exchange is divided by L;
* a(I) counts a fork again when all its branches are inside;
* every machine is used, whether it helps or not;
* nodes not connected to the first source are left out;
* memory is not looked at here.

The published optimizer also prices, on lower levels, ranges between states of which neither holds
the other. They are no sets of nodes; here they are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...core.errors import InvalidInput
from ..dag.downsets import as_set, nodes_of
from .dynamic_program import MachineLevel, States, chain_states
from .search import SplitBounds, SplitStage, best_split

TOLERANCE = 1e-4
"""Relative gap at which the search of a large graph stops; a small one is solved exactly."""

MAX_MACHINES = 512
"""Per level: tables grow with their square."""


@dataclass(frozen=True)
class PipeDreamStage:
    """A stage at one level of the machine hierarchy.

    The machines of this level share its minibatches; each has the pipeline ``inner`` inside, empty
    at the lowest level.
    """

    node_ids: tuple[str, ...]
    replicas: int
    inner: tuple[PipeDreamStage, ...] = ()


@dataclass(frozen=True)
class PipeDreamSplit:
    """The best split found by PipeDream's objective.

    Values are in seconds per minibatch; the stages are those of the highest level. Nothing connects
    the nodes ``left_out`` to the first source.
    """

    value_s: float
    lower_bound_s: float
    stages: tuple[PipeDreamStage, ...]
    num_states: int
    left_out: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """Return (value - lower bound) / value; 0 if both are 0."""
        return (self.value_s - self.lower_bound_s) / self.value_s if self.value_s else 0.0


def pipedream_chain(
    times_s: Sequence[float],
    parameter_bytes: Sequence[float],
    boundary_bytes: Sequence[float],
    machines: Sequence[int],
    bandwidths_bytes_per_s: Sequence[float],
) -> PipeDreamSplit:
    """Find the best split of L layers in a row; nodes are named by position, from "0".

    Exact; O(L^2 M^2) on one level.
    """
    levels = pipedream_levels(machines, bandwidths_bytes_per_s)
    states = chain_states(times_s, parameter_bytes, boundary_bytes)
    names = tuple(str(layer) for layer in range(len(times_s)))
    return as_split(best_split(states, levels, TOLERANCE), states, names, ())


def pipedream_levels(
    machines: Sequence[int], bandwidths: Sequence[float]
) -> tuple[MachineLevel, ...]:
    """Check the machine hierarchy and return its levels."""
    if not machines or len(machines) != len(bandwidths):
        raise InvalidInput(
            f"{len(machines)} numbers of machines and {len(bandwidths)} bandwidths; give one of "
            "each per level, and at least one level"
        )
    for count, bandwidth in zip(machines, bandwidths, strict=True):
        if not 1 <= count <= MAX_MACHINES:
            raise InvalidInput(f"{count} machines; a level has 1 to {MAX_MACHINES}")
        if not (math.isfinite(bandwidth) and bandwidth > 0):
            raise InvalidInput(f"bandwidth {bandwidth} is not positive and finite")
    below = (1, *machines[:-1])
    return tuple(
        MachineLevel(int(count), float(bandwidth), int(fewer))
        for count, bandwidth, fewer in zip(machines, bandwidths, below, strict=True)
    )


def as_split(
    found: SplitBounds, states: States, node_ids: Sequence[str], left_out: tuple[str, ...]
) -> PipeDreamSplit:
    return PipeDreamSplit(
        value_s=found.value_s,
        lower_bound_s=found.lower_bound_s,
        stages=tuple(_as_stage(piece, states, node_ids) for piece in found.pieces),
        num_states=states.last,
        left_out=left_out,
    )


def _as_stage(piece: SplitStage, states: States, node_ids: Sequence[str]) -> PipeDreamStage:
    rows = states.rows
    members = as_set(np.bitwise_and(rows[piece.last], ~rows[piece.first]))
    return PipeDreamStage(
        tuple(node_ids[node] for node in nodes_of(members)),
        piece.replicas,
        tuple(_as_stage(inner, states, node_ids) for inner in piece.inner),
    )
