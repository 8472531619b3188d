"""The band of a long chain's stages that are short enough for some device's memory.

A table of every pair of positions grows with their square. But where weights and what training
adds to them fill a device, a stage of many layers fits nowhere; what remains is a band beside
the diagonal, and it can be searched whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ...core.models.training_memory import training_bytes
from ...core.plan.plan import PlanOptions
from ...core.profile.profile import Profile, list_parameters
from .chain import (
    ChainStages,
    Items,
    crossing_columns,
    held_columns,
    held_items,
    is_learned,
    is_shareable,
    largest_columns,
    sum_atoms,
    tied_parameters,
)
from .device_classes import Devices
from .sharing import divided_bytes
from .work_limits import WorkLimits

Integers = NDArray[np.int64]

MAX_STAGES = 4_000_000
"""Stages of a band that are still searched whole: 10 s."""


@dataclass(frozen=True, eq=False)
class BandStages(ChainStages):
    """A chain's stages that are short enough for some device."""

    @cached_property
    def whole_s(self) -> tuple[float, float]:
        return float(self.front_forward_s[-1]), float(self.front_backward_s[-1])


def band(
    profile: Profile,
    positions: Sequence[int],
    devices: Devices,
    options: PlanOptions,
    limits: WorkLimits | None = None,
) -> BandStages | None:
    """Return every stage that could fit some device, or None if there are too many.

    A stage is left out only if the weights, gradients and optimizer state of parameters that
    begin in it are more than any device allows, or if it does not keep the limits of its work.
    O(stages).
    """
    limit_bytes = [entry.limit_bytes for entry in devices.classes]
    is_limited = None not in limit_bytes and options.objective != "latency"
    if not is_limited and limits is None:
        return None
    if limits is not None:
        positions = _allowed_in_time(profile, positions, limits)
    edges = np.array(positions, dtype=np.int64)
    atoms = np.searchsorted(edges, np.arange(len(profile.layers)), side="right") - 1
    last = np.full(len(edges) - 1, len(edges) - 1)
    if limits is not None:
        last = _farthest_in_time(profile, edges, limits.longest_s)
    if is_limited:
        limit = max(x for x in limit_bytes if x)
        last = np.minimum(last, _farthest(profile, options, atoms, len(edges) - 1, limit))
    count = int((last - np.arange(len(last))).sum())
    width = int((last - np.arange(len(last))).max())
    # The grids have a full width of entries for every position, used or not.
    if count > MAX_STAGES or width * len(last) > 2 * MAX_STAGES:
        return None
    return _stages(profile, edges, atoms, last)


def _front_s(profile: Profile, edges: Integers) -> NDArray[np.float64]:
    """Return the work in front of each position."""
    forward, backward = sum_atoms(profile, edges)
    return np.concatenate([[0.0], np.cumsum(forward + backward)])


def _allowed_in_time(
    profile: Profile, positions: Sequence[int], limits: WorkLimits
) -> tuple[int, ...]:
    front_s = _front_s(profile, np.array(positions, dtype=np.int64))
    kept = limits.allows_cut(front_s, float(front_s[-1]))
    kept[[0, -1]] = True
    return tuple(np.array(positions)[kept].tolist())


def _farthest_in_time(profile: Profile, edges: Integers, longest_s: float) -> Integers:
    """Return, per first position, the last at which a stage's layers take no longer."""
    front_s = _front_s(profile, edges)
    last: Integers = np.searchsorted(front_s, front_s[:-1] + longest_s, side="right") - 1
    return np.clip(last, np.arange(1, len(edges)), len(edges) - 1)


def _farthest(
    profile: Profile, options: PlanOptions, atoms: Integers, num_atoms: int, limit: int
) -> Integers:
    """Return, per first position, the last position at which a stage may end."""
    training = training_bytes(options.precision, options.optimizer)
    # An item counts only where it first appears: a lower bound of what a stage holds, so no
    # stage that fits is left out.
    own = np.zeros(num_atoms, dtype=np.int64)
    for entry in list_parameters(profile):
        if entry.layers:
            gradients, learned = (
                each * is_learned(entry) for each in (entry.size_bytes, entry.numel)
            )
            more = gradients + training.of(learned)
            if is_shareable(entry):
                more -= int(divided_bytes(options, entry.size_bytes, gradients, learned))
            own[atoms[entry.layers[0]]] += entry.size_bytes + more
    before = np.concatenate([[0], np.cumsum(own)])
    last = np.searchsorted(before, before[:-1] + limit, side="right") - 1
    return np.clip(last, np.arange(1, num_atoms + 1), num_atoms)


@dataclass(frozen=True)
class _Band:
    """Rows of atoms: row i has those a stage from position i may hold, [positions, width].

    Attributes:
        first: Position each stage begins at.
        length: Its atoms, less one: the column it ends in.
        column: The atom in each entry of the rows; entries beyond a row's end repeat the last atom.
    """

    atoms: Integers
    first: Integers
    length: Integers
    column: Integers

    @classmethod
    def of(cls, atoms: Integers, farthest: Integers) -> _Band:
        """Build the band of stages that end at ``farthest`` at the latest."""
        n = len(farthest)
        lengths = farthest - np.arange(n)
        offsets = np.arange(int(lengths.max()))
        first, length = np.nonzero(offsets[None, :] < lengths[:, None])
        column = np.minimum(np.arange(n)[:, None] + offsets[None, :], n - 1)
        return cls(atoms, first.astype(np.int64), length.astype(np.int64), column)

    def sum_times(self, atom_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return each stage's sum of its atoms' times."""
        # Summed from each row's start, as in the full tables: both give results equal bit for bit.
        sums: NDArray[np.float64] = np.cumsum(atom_s[self.column], axis=1)[self.first, self.length]
        return sums

    def find_largest(self, atoms: Integers) -> Integers:
        """Return each stage's largest of its atoms' figures."""
        found: Integers = np.maximum.accumulate(atoms[self.column], axis=1)
        return found[self.first, self.length]

    def sum_held(self, items: Items) -> Integers:
        """Return each stage's bytes of the items it holds, each item once."""
        before, atom, size = held_items(self.atoms, items)
        total = np.zeros(len(self.column), dtype=np.int64)
        np.add.at(total, atom, size)
        grid = total[self.column]
        _leave_out_held(grid, before, atom, size)
        sums: Integers = np.cumsum(grid, axis=1)[self.first, self.length]
        return sums


def _stages(profile: Profile, edges: Integers, atoms: Integers, farthest: Integers) -> BandStages:
    n = len(edges) - 1
    band = _Band.of(atoms, farthest)
    first, length = band.first, band.length
    last = first + length + 1
    loss, ends = profile.loss, last == n
    forward, backward = sum_atoms(profile, edges)
    again = band.sum_times(forward)
    forward_s, backward_s = again.copy(), band.sum_times(backward)
    held = held_columns(profile, band.sum_held)
    front_forward = np.concatenate([[0.0], np.cumsum(forward)])
    front_backward = np.concatenate([[0.0], np.cumsum(backward)])
    if loss:
        forward_s[ends] += loss.forward.median_s
        backward_s[ends] += loss.backward.median_s
        held["saved_bytes"][ends] += loss.saved_activation_bytes
        front_forward[n] += loss.forward.median_s
        front_backward[n] += loss.backward.median_s
    return BandStages(
        profile=profile,
        num_atoms=n,
        most_stages=n,
        first=first,
        last=last,
        forward_s=forward_s,
        backward_s=backward_s,
        recompute_s=again,
        front_forward_s=front_forward,
        front_backward_s=front_backward,
        tied=tied_parameters(profile),
        positions=tuple(int(edge) for edge in edges),
        **held,
        **largest_columns(
            profile, lambda each: band.find_largest(np.maximum.reduceat(each, edges[:-1]))
        ),
        **crossing_columns(profile, edges),
    )


def _leave_out_held(grid: Integers, before: Integers, atom: Integers, size: Integers) -> None:
    """Subtract from grid[first, l] the items of atom first + l that an atom since first holds."""
    width = grid.shape[1]
    near = (before >= 0) & (atom - before < width)
    before, atom, size = before[near], atom[near], size[near]
    lowest = np.maximum(atom - width + 1, 0)
    number = before - lowest + 1
    which = np.repeat(np.arange(len(before)), number)
    offset = np.arange(len(which)) - np.repeat(np.cumsum(number) - number, number)
    first = lowest[which] + offset
    np.subtract.at(grid, (first, atom[which] - first), size[which])
