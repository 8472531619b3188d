"""Lower bound on the simulated step of schedules without a closed form.

For r replicas of one class each, n = ceil(m / r); v_1 >= v_2 >= ... are the speeds of the places
there are for r devices, V is the highest; f + b is a layer's work and W = F + B the model's, with
the recomputed forward in B where all stages are recomputed. The bound is the least over r of
the larger of:

**Wait.** Place p has p - 1 stages in front, of a layer each at least: it starts after their
forward, and its last gradient runs back through them. With w_p the work of the first p - 1 layers
at V, the places' time is enough for all work: sum_p v_p (T - w_p) >= n W over the first k places,
for some k.

**The heaviest layer** is on one stage: T >= (forward in front + n (f + b) + backward in front) / V.

And whatever r, T >= W / V: one micro-batch. Where backwards are split, gradients run back before
the weights' parts are done, so no backward in front is counted, and of one micro-batch only the
forward and the gradients of inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...core.profile.backward_parts import layer_parts_s, stage_parts_s
from ...schedules.traits import SPLIT_BACKWARD
from ..cost.chain import Seconds
from ..problem.problem import PlanningRequest
from ..search.branch_and_bound import ROUNDING


@dataclass(frozen=True)
class SimulatedStepBound:
    """Lower bound on the simulated step of every plan."""

    request: PlanningRequest
    chunks: int

    def bound_s(self) -> float:
        """Return the least bound over all numbers of replicas, in O(N sqrt(m)) for N atoms."""
        least_s = min(
            max(self._waiting_s(*shape), self._heaviest_s(shape[0])) for shape in self._shapes()
        )
        return max(self._through_s(), least_s) * (1 - ROUNDING)

    @property
    def splits(self) -> bool:
        return self.request.options.schedule in SPLIT_BACKWARD

    @cached_property
    def atoms_s(self) -> tuple[Seconds, Seconds]:
        """Return forward and backward time of each atom at speed 1."""
        profile, firsts = self.request.profile, self.request.positions[:-1]
        layers = profile.layers
        forward_s = np.add.reduceat([entry.forward.median_s for entry in layers], firsts)
        backward_s = np.add.reduceat([entry.backward.median_s for entry in layers], firsts)
        if self.splits:
            parts_s = [sum(layer_parts_s(entry)) for entry in layers]
            backward_s = np.add.reduceat(parts_s, firsts)
        if self.request.options.recompute == "always":
            backward_s = backward_s + forward_s
        if profile.loss:
            forward_s[-1] += profile.loss.forward.median_s
            backward_s[-1] += profile.loss.backward.median_s
        return forward_s, backward_s

    @cached_property
    def whole_s(self) -> tuple[float, float]:
        forward_s, backward_s = self.atoms_s
        return math.fsum(forward_s), math.fsum(backward_s)

    @cached_property
    def most_replicas(self) -> int:
        options, classes = self.request.options, self.request.devices.classes
        most = min(options.num_microbatches, max(map(len, classes)))
        return min(most, options.max_replicas or most)

    def _shapes(self) -> Iterator[tuple[int, list[float]]]:
        """Yield the micro-batches of a first replica, and the speeds of the possible places.

        Numbers of replicas that leave a replica equally many micro-batches are represented by the
        least of them, which has the most places; so there are O(sqrt(m)) of them.
        """
        options, atoms = self.request.options, len(self.request.positions) - 1
        atoms = min(atoms, options.num_stages or atoms, options.max_stages or atoms)
        classes = sorted(self.request.devices.classes, key=lambda entry: -entry.speed)
        replicas = 1
        while replicas <= self.most_replicas:
            # Replicas take micro-batches in turn: the first one has the most.
            share = -(-options.num_microbatches // replicas)
            most = max(1, atoms // self.chunks)
            speeds: list[float] = []
            for entry in classes:
                speeds += [entry.speed] * min(len(entry) // replicas, most - len(speeds))
            yield share, speeds
            # On to the least number of replicas that leaves the first one fewer micro-batches.
            fewer = share - 1
            replicas = -(-options.num_microbatches // fewer) if fewer else self.most_replicas + 1

    def _waiting_s(self, share: int, speeds: list[float]) -> float:
        """Bound by waiting: place p waits for p earlier atoms, also backward if unsplit."""
        forward_s, backward_s = self.atoms_s
        front_s = np.cumsum(forward_s if self.splits else forward_s + backward_s)
        waits_s = np.concatenate(([0.0], front_s))[: len(speeds)] / self._fastest
        speed = np.asarray(speeds)
        least_s = (share * sum(self.whole_s) + np.cumsum(speed * waits_s)) / np.cumsum(speed)
        return float(least_s.min())

    def _heaviest_s(self, share: int) -> float:
        """Bound by the heaviest atom: one replica runs its share of micro-batches, in full."""
        forward_s, backward_s = self.atoms_s
        front_s = np.cumsum(forward_s) - forward_s
        if not self.splits:
            front_s += np.cumsum(backward_s) - backward_s
        return float((front_s + share * (forward_s + backward_s)).max()) / self._fastest

    def _through_s(self) -> float:
        """Bound by one micro-batch, which runs forth and back through all stages."""
        forward_s, backward_s = self.whole_s
        if self.splits:
            again, profile = self.request.options.recompute == "always", self.request.profile
            layers = range(len(profile.layers))
            backward_s, _ = stage_parts_s(profile, layers, recompute=again)
        return (forward_s + backward_s) / self._fastest

    @property
    def _fastest(self) -> float:
        return self.request.devices.fastest
