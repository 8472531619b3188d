"""Stage tables: costs of every candidate stage, and how those of a chain are built.

For a chain of layers a position is a place between two layers; for a graph of branches it is the
set of layers in front of a cut. Ids of positions ascend along every stage, from 0 (nothing is in
front) to N (everything is).

The cost tables of a chain are one per quantity, indexed [first, last]. This is where a profile's
numbers become a stage's time and memory; `docs/concepts/planner.md` gives the formulas. Tables have
shape (N + 1, N + 1) for N + 1 positions at which stages may begin and end; entry [first, last] is
the stage between two positions, and only entries with first < last mean anything. Nothing here
depends on what is asked for, so plans of one profile share the tables.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from ...core.graph.graph import Parameter
from ...core.profile.profile import Profile, list_parameters

Seconds = NDArray[np.float64]
Bytes = NDArray[np.int64]
Positions = NDArray[np.int64]
Mask = NDArray[np.bool_]

Order = tuple[int, ...]
"""The profile's layer at each place; empty for the profile's own order."""


Items = Iterable[tuple[int, tuple[int, ...]]]
"""Sizes of things that stages hold once, each with the layers that use it."""


class HeldFields(TypedDict):
    """Fields of `CostColumns`, one entry a stage, that count everything a stage holds once."""

    weights_bytes: Bytes
    gradients_bytes: Bytes
    learned_elements: Bytes
    shareable_elements: Bytes
    shareable_bytes: Bytes
    shareable_gradients_bytes: Bytes
    saved_bytes: Bytes


class LargestFields(TypedDict):
    """Fields of `CostColumns`, one entry a stage, that are the largest of its layers' figures."""

    largest_elements: Bytes
    layer_bytes: Bytes
    layer_elements: Bytes
    workspace_bytes: Bytes


class CrossingFields(TypedDict):
    """Fields of `CostColumns` with an entry for every position, shape (N + 1,)."""

    arriving_bytes: Bytes
    returning_bytes: Bytes
    input_bytes: Bytes


@dataclass(frozen=True, eq=False)
class CostColumns:
    """Costs of stages between N + 1 positions, on the device profiled; nothing of options.

    Attributes:
        forward_s: Forward time per micro-batch, the loss included where the stage is last.
        backward_s: Backward time per micro-batch, with the loss where the stage is last.
        recompute_s: Forward time without the loss.
        weights_bytes: Parameters and buffers used, each storage once.
        gradients_bytes: One gradient per trainable parameter, in its dtype.
        learned_elements: Elements of the trainable parameters.
        shareable_elements: Elements of those that a single layer uses.
        shareable_bytes: All parameters that a single layer uses, frozen ones too.
        shareable_gradients_bytes: One gradient per trainable one of these.
        largest_elements: Elements of the largest of these.
        layer_bytes: The most ``shareable_bytes`` of any layer.
        layer_elements: The most ``shareable_elements`` of any layer.
        saved_bytes: Activations kept for backward per micro-batch.
        workspace_bytes: Largest temporary memory of any layer.
        arriving_bytes: Activations that cross a cut there.
        returning_bytes: Gradients that cross it back.
        input_bytes: What a stage that begins there reads: ``arriving_bytes``, at the front the
            model's inputs.
        tied: Trainable parameters used by several layers.
    """

    profile: Profile
    forward_s: Seconds
    backward_s: Seconds
    recompute_s: Seconds
    weights_bytes: Bytes
    gradients_bytes: Bytes
    learned_elements: Bytes
    shareable_elements: Bytes
    shareable_bytes: Bytes
    shareable_gradients_bytes: Bytes
    largest_elements: Bytes
    layer_bytes: Bytes
    layer_elements: Bytes
    saved_bytes: Bytes
    workspace_bytes: Bytes
    arriving_bytes: Bytes
    returning_bytes: Bytes
    input_bytes: Bytes
    tied: tuple[Parameter, ...]


STAGE_COLUMNS = (
    "forward_s", "backward_s", "recompute_s", *HeldFields.__annotations__,
    *LargestFields.__annotations__,
)  # fmt: skip
"""Fields of `CostColumns` with an entry for every stage."""


@dataclass(frozen=True, eq=False)
class StageTable(CostColumns, ABC):
    """Costs of E stages, columns of shape (E,).

    Attributes:
        num_atoms: N.
        most_stages: No plan has more.
        first: Position each stage begins at, shape (E,), ascending.
        last: Position it ends at, ascending among stages with one first position.
        front_forward_s: Per position, forward time of all layers in front.
        front_backward_s: Per position, their backward time.
    """

    num_atoms: int
    most_stages: int
    first: Positions
    last: Positions
    front_forward_s: Seconds
    front_backward_s: Seconds

    @abstractmethod
    def holds(self, layer: int) -> Mask:
        """Return a mask of the stages that hold a layer of the profile, shape (E,)."""

    @abstractmethod
    def layout(self, positions: Sequence[int]) -> tuple[Order, tuple[int, ...]]:
        """Return the layer order, and the cuts in it, of the stages between these positions."""

    @property
    @abstractmethod
    def keeps_order(self) -> bool:
        """Return True if stages follow the profile's order of layers."""

    @cached_property
    def whole_s(self) -> tuple[float, float]:
        """Return the forward and backward time of the whole model, the loss included."""
        whole = int(np.searchsorted(self.first, 0, side="right")) - 1
        return float(self.forward_s[whole]), float(self.backward_s[whole])


@dataclass(frozen=True, eq=False)
class ChainCosts(CostColumns):
    """Costs of every stage between some positions of one profile, tables [first, last].

    Attributes:
        positions: Layers in front of which a stage may begin, from 0, and the number of layers.
        order: Where ``profile`` is another one with its layers reordered: that one's layer at
            each place.
    """

    positions: tuple[int, ...]
    order: Order = ()

    @property
    def num_atoms(self) -> int:
        """N, the intervals between neighbouring positions."""
        return len(self.positions) - 1

    @cached_property
    def even_cuts(self) -> dict[int, tuple[int, ...]]:
        """Cuts of even times by number of stages, kept for the next plan of the profile."""
        return {}

    @cached_property
    def index(self) -> dict[int, int]:
        """Position of each layer index in ``positions``."""
        return {layer: index for index, layer in enumerate(self.positions)}

    def has(self, cuts: Iterable[int]) -> bool:
        """Return True if all these layer indices are positions."""
        return all(cut in self.index for cut in cuts)

    @cached_property
    def stages(self) -> ChainStages:
        """Return every stage as one row of a stage table."""
        first, last = span = np.triu_indices(self.num_atoms + 1, k=1)
        return ChainStages(
            profile=self.profile,
            num_atoms=self.num_atoms,
            most_stages=self.num_atoms,
            first=first.astype(np.int64),
            last=last.astype(np.int64),
            **{name: getattr(self, name)[span] for name in STAGE_COLUMNS},
            arriving_bytes=self.arriving_bytes,
            returning_bytes=self.returning_bytes,
            input_bytes=self.input_bytes,
            front_forward_s=_in_front(self.forward_s),
            front_backward_s=_in_front(self.backward_s),
            tied=self.tied,
            positions=self.positions,
            order=self.order,
        )


def _in_front(table: Seconds) -> Seconds:
    """Return the sums from the first position to each position."""
    row: Seconds = table[0].copy()
    row[0] = 0.0
    return row


@dataclass(frozen=True, eq=False)
class ChainStages(StageTable):
    """The stages of a chain."""

    positions: tuple[int, ...]
    order: Order = ()

    def holds(self, layer: int) -> Mask:
        atom = bisect_right(self.positions, layer) - 1
        inside: Mask = (self.first <= atom) & (atom < self.last)
        return inside

    def layout(self, positions: Sequence[int]) -> tuple[Order, tuple[int, ...]]:
        return self.order, tuple(self.positions[position] for position in positions)

    @property
    def keeps_order(self) -> bool:
        return True


def legal_positions(profile: Profile) -> tuple[int, ...]:
    """Return the positions at which the profile allows a cut: 0, after each legal boundary, L."""
    inner = (gap.after + 1 for gap in profile.boundaries if gap.legal)
    return (0, *inner, len(profile.layers))


def chain_costs(profile: Profile, positions: Sequence[int]) -> ChainCosts:
    """Compute the costs of every stage between these positions in O(N^2 + size of the profile).

    Positions are layer indices that ascend from 0 to the number of layers.
    """
    edges = np.array(positions, dtype=np.int64)
    count, loss = len(edges) - 1, profile.loss
    forward, backward = sum_atoms(profile, edges)
    atoms = np.searchsorted(edges, np.arange(len(profile.layers)), side="right") - 1
    held = held_columns(profile, partial(_held, count, atoms))
    if loss:
        held["saved_bytes"][:, count] += loss.saved_activation_bytes
    return ChainCosts(
        profile=profile,
        positions=tuple(int(edge) for edge in edges),
        forward_s=_sums(forward, loss.forward.median_s if loss else 0.0),
        backward_s=_sums(backward, loss.backward.median_s if loss else 0.0),
        recompute_s=_sums(forward, 0.0),
        **largest_columns(profile, lambda each: _largest(np.maximum.reduceat(each, edges[:-1]))),
        tied=tied_parameters(profile),
        **held,
        **crossing_columns(profile, edges),
    )


def is_learned(parameter: Parameter) -> bool:
    """Return True for a trainable parameter, not a buffer."""
    return parameter.kind == "parameter" and parameter.trainable


def is_shareable(parameter: Parameter) -> bool:
    """Return True for a parameter that a single layer uses."""
    return parameter.kind == "parameter" and len(parameter.layers) == 1


def tied_parameters(profile: Profile) -> tuple[Parameter, ...]:
    """Return the trainable parameters used by several layers."""
    return tuple(
        entry for entry in list_parameters(profile) if is_learned(entry) and len(entry.layers) > 1
    )


def saved_items(profile: Profile) -> Items:
    """Yield saved activations, by storage where the profile lists them."""
    if profile.storages:
        return ((entry.size_bytes, entry.layers) for entry in profile.storages)
    layers = enumerate(profile.layers)
    return ((entry.saved_activation_bytes, (index,)) for index, entry in layers)


def held_columns(profile: Profile, sum_held: Callable[[Items], Bytes]) -> HeldFields:
    """Return the columns that count everything a stage holds once; the loss is left out."""
    parameters = list_parameters(profile)
    learned = [entry for entry in parameters if is_learned(entry)]
    alone = [entry for entry in parameters if is_shareable(entry)]
    return {
        "weights_bytes": sum_held((entry.size_bytes, entry.layers) for entry in parameters),
        "gradients_bytes": sum_held((entry.size_bytes, entry.layers) for entry in learned),
        "learned_elements": sum_held((entry.numel, entry.layers) for entry in learned),
        "shareable_elements": sum_held(
            (entry.numel, entry.layers) for entry in alone if is_learned(entry)
        ),
        "shareable_bytes": sum_held((entry.size_bytes, entry.layers) for entry in alone),
        "shareable_gradients_bytes": sum_held(
            (entry.size_bytes, entry.layers) for entry in alone if is_learned(entry)
        ),
        "saved_bytes": sum_held(saved_items(profile)),
    }


def sum_atoms(profile: Profile, edges: Positions) -> tuple[Seconds, Seconds]:
    """Return forward and backward time of the layers between positions."""
    layers, begins = profile.layers, edges[:-1]
    return (
        np.add.reduceat([entry.forward.median_s for entry in layers], begins),
        np.add.reduceat([entry.backward.median_s for entry in layers], begins),
    )


def list_largest(profile: Profile) -> LargestFields:
    """Return the figures of every layer, the largest of which count for a stage."""
    largest, sizes, elements = np.zeros((3, len(profile.layers)), dtype=np.int64)
    for entry in filter(is_shareable, list_parameters(profile)):
        at, learned = entry.layers[0], entry.numel * is_learned(entry)
        largest[at] = max(largest[at], learned)
        sizes[at] += entry.size_bytes
        elements[at] += learned
    return {
        "largest_elements": largest,
        "layer_bytes": sizes,
        "layer_elements": elements,
        "workspace_bytes": np.array([entry.workspace_bytes for entry in profile.layers]),
    }


def largest_columns(profile: Profile, of_stages: Callable[[Bytes], Bytes]) -> LargestFields:
    """Return the columns of what is largest in a stage, from the figures of each layer."""
    layers: Any = list_largest(profile)
    columns: Any = {name: of_stages(each) for name, each in layers.items()}
    found: LargestFields = columns
    return found


def crossing_columns(profile: Profile, edges: Positions) -> CrossingFields:
    """Return, per position, bytes crossing it (none at the ends) and those a stage there reads."""
    inner = [profile.boundaries[edge - 1] for edge in edges[1:-1]]
    arriving = np.array([0, *(gap.forward_bytes for gap in inner), 0], dtype=np.int64)
    returning = np.array([0, *(gap.backward_bytes for gap in inner), 0], dtype=np.int64)
    inputs = arriving.copy()
    inputs[0] = sum(tensor.size_bytes for tensor in profile.inputs)
    return {"arriving_bytes": arriving, "returning_bytes": returning, "input_bytes": inputs}


def _sums(atom_s: Seconds, loss_s: float) -> Seconds:
    """Return table[first, last] = sum of the atoms, plus the loss in the last stage.

    Each row is summed from its own start, so that no large prefix swallows a small stage.
    """
    n = len(atom_s)
    row = np.concatenate([[0.0], atom_s])
    table: Seconds = np.cumsum(np.where(_inside(n), row[None, :], 0.0), axis=1)
    table[:, n] += loss_s
    return table


def _inside(n: int) -> NDArray[np.bool_]:
    positions = np.arange(n + 1)
    inside: NDArray[np.bool_] = positions[None, :] > positions[:, None]
    return inside


def _held(num_atoms: int, atoms: Positions, items: Items) -> Bytes:
    """Return table[first, last] = bytes of the items with at least one layer in the stage.

    The first atom of an item at or after ``first`` is ``atom`` for every first in
    (previous atom, atom], and the stage holds the item once last > atom: a rectangle, added at
    its corners and summed over both axes.
    """
    before_row, after_row, size = held_items(atoms, items)
    corners = np.zeros((num_atoms + 2, num_atoms + 1), dtype=np.int64)
    np.add.at(corners, (before_row + 1, after_row + 1), size)
    np.subtract.at(corners, (after_row + 1, after_row + 1), size)
    np.cumsum(corners, axis=0, out=corners)
    np.cumsum(corners, axis=1, out=corners)
    return corners[: num_atoms + 1]


def held_items(atoms: Positions, items: Items) -> tuple[Bytes, Bytes, Bytes]:
    """Return, per use of an item by an atom, the item's previous atom (or -1), the atom, bytes."""
    found: list[tuple[int, int, int]] = []
    for size_bytes, layers in items:
        before = -1
        for layer in layers:
            after = int(atoms[layer])
            if after != before:
                found.append((before, after, size_bytes))
                before = after
    before_atoms, atoms_held, sizes = np.array(found, dtype=np.int64).reshape(-1, 3).T
    return before_atoms, atoms_held, sizes


def _largest(atom_bytes: Bytes) -> Bytes:
    """Return table[first, last] = largest of the atoms in the stage."""
    n = len(atom_bytes)
    row = np.concatenate([np.zeros(1, dtype=np.int64), atom_bytes])
    table: Bytes = np.maximum.accumulate(np.where(_inside(n), row[None, :], 0), axis=1)
    return table
