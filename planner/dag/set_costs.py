"""Costs of stages that are differences of layer sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.profile.profile import Profile, list_parameters
from ..cost.chain import (
    STAGE_COLUMNS,
    Bytes,
    ChainCosts,
    CrossingFields,
    HeldFields,
    LargestFields,
    Order,
    Positions,
    Seconds,
    is_learned,
    is_shareable,
    largest_columns,
    saved_items,
    tied_parameters,
)
from .reorder import TensorUses

Members = NDArray[np.uint8]
"""1 where a layer is in a set, [sets, layers]."""

WEIGHTS, GRADIENTS, ELEMENTS, SAVED, SHAREABLE = range(5)


class StageCostFields(HeldFields, LargestFields, CrossingFields):
    """Fields of a `StageTable` that follow from its sets."""

    forward_s: Seconds
    backward_s: Seconds
    recompute_s: Seconds
    front_forward_s: Seconds
    front_backward_s: Seconds


@dataclass(frozen=True)
class _Item:
    """Sizes of everything shared by one group of several layers."""

    layers: tuple[int, ...]
    sizes: tuple[int, ...]


class SetCosts:
    """Costs of sets of a profile's layers, derived from its edges."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        uses = TensorUses(profile)
        uses.check_own_order()
        layers = profile.layers
        self.forward_s = np.array([entry.forward.median_s for entry in layers])
        self.backward_s = np.array([entry.backward.median_s for entry in layers])
        self.alone, self.shared = _items(profile)
        self.tied = tied_parameters(profile)
        names = list(uses.tensors)
        self.made = np.array([uses.made[name] for name in names], dtype=np.int64)
        self.read = np.zeros((len(names), len(layers)), dtype=np.float32)
        for row, name in enumerate(names):
            self.read[row, list(uses.read.get(name, ()))] = 1
        self.handed_out = np.array([name in uses.handed_out for name in names], dtype=np.bool_)
        specs = [uses.tensors[name] for name in names]
        self.sent = np.array([entry.size_bytes for entry in specs], dtype=np.int64)
        back = [entry.size_bytes * entry.requires_grad for entry in specs]
        self.sent_back = np.array(back, dtype=np.int64)

    def crossing(self, members: Members) -> tuple[Bytes, Bytes]:
        """Return the bytes of activations and of gradients that cross the cut behind each set.

        A tensor crosses if it is made in the set, or is an input of the model, and is read
        behind it or handed out. Nothing crosses at either end.
        """
        behind = 1 - members
        # float32, as numpy multiplies integer matrices without BLAS; counts stay exact to 2**24.
        crosses = behind.astype(np.float32) @ self.read.T > 0
        crosses |= self.handed_out[None, :]
        inside = members[:, np.maximum(self.made, 0)] > 0
        crosses &= inside | (self.made < 0)[None, :]
        counts = members.sum(axis=1, dtype=np.int64)
        crosses[(counts == 0) | (counts == members.shape[1])] = False
        crossing = crosses.astype(np.int64)
        return crossing @ self.sent, crossing @ self.sent_back

    def costs(self, members: Members, first: Positions, last: Positions) -> StageCostFields:
        """Compute the costs of stages between sets; each first set lies inside the last one."""
        loss, whole = self.profile.loss, members.sum(axis=1, dtype=np.int64) == members.shape[1]
        is_last = whole[last]
        front_forward, front_backward = members @ self.forward_s, members @ self.backward_s
        # A difference of two sums may round to just below zero.
        forward = np.maximum(front_forward[last] - front_forward[first], 0.0)
        backward = np.maximum(front_backward[last] - front_backward[first], 0.0)
        front = members.astype(np.int64) @ self.alone
        totals = (front[last] - front[first]).T
        alone = totals.copy()
        self._add_shared(totals, members, first, last)
        weights, gradients, elements, saved, _ = totals
        if loss:
            saved += loss.saved_activation_bytes * is_last
        arriving, returning = self.crossing(members)
        inputs = arriving.copy()
        inputs[0] = sum(tensor.size_bytes for tensor in self.profile.inputs)
        return StageCostFields(
            forward_s=forward + (loss.forward.median_s if loss else 0.0) * is_last,
            backward_s=backward + (loss.backward.median_s if loss else 0.0) * is_last,
            recompute_s=forward,
            weights_bytes=weights,
            gradients_bytes=gradients,
            learned_elements=elements,
            shareable_elements=alone[ELEMENTS],
            shareable_bytes=alone[SHAREABLE],
            shareable_gradients_bytes=alone[GRADIENTS],
            saved_bytes=saved,
            **largest_columns(self.profile, lambda each: _find_largest(each, members, first, last)),
            arriving_bytes=arriving,
            returning_bytes=returning,
            input_bytes=inputs,
            front_forward_s=front_forward,
            front_backward_s=front_backward,
        )

    def _add_shared(
        self, totals: Bytes, members: Members, first: Positions, last: Positions
    ) -> None:
        """Add to the totals, [5, stages], what several layers share, once for each stage.

        A stage uses an item if its last set holds more of the item's layers than its first one.
        Where the first set holds none of them that is so if the last one holds any: a difference
        of sums over sets. Only where it holds a part have stages to be looked at.
        """
        front = np.zeros((len(members), len(totals)), dtype=np.int64)
        begin = np.searchsorted(first, np.arange(len(members) + 1))
        for item in self.shared:
            sizes = np.array(item.sizes, dtype=np.int64)
            counts = members[:, item.layers].sum(axis=1, dtype=np.int64)
            front += (counts > 0)[:, None] * sizes
            parts = np.flatnonzero((counts > 0) & (counts < len(item.layers)))
            stages = _ranges(begin[parts], begin[parts + 1])
            stages = stages[counts[last[stages]] > counts[first[stages]]]
            for total, size in zip(totals, item.sizes, strict=True):
                if size:
                    total[stages] += size
        totals += (front[last] - front[first]).T

    def chain_costs(self, order: Order, cuts: tuple[int, ...]) -> ChainCosts:
        """Return the costs of every stage between the cuts of a layer order."""
        place = np.empty(len(order), dtype=np.int64)
        place[list(order)] = np.arange(len(order))
        members = (place[None, :] < np.array(cuts)[:, None]).astype(np.uint8)
        size = len(cuts)
        first, last = np.triu_indices(size, k=1)
        costs: Any = self.costs(members, first.astype(np.int64), last.astype(np.int64))

        def fill_table(values: NDArray[Any]) -> NDArray[Any]:
            table = np.zeros((size, size), dtype=values.dtype)
            table[first, last] = values
            return table

        return ChainCosts(
            profile=self.profile,
            positions=cuts,
            **{name: fill_table(costs[name]) for name in STAGE_COLUMNS},
            **{name: costs[name] for name in CrossingFields.__annotations__},
            tied=tuple(
                entry.model_copy(
                    update={"layers": tuple(sorted(int(place[layer]) for layer in entry.layers))}
                )
                for entry in self.tied
            ),
            order=order,
        )


def _find_largest(sizes: Bytes, members: Members, first: Positions, last: Positions) -> Bytes:
    """Return each stage's largest layer by counting layers per size, largest first."""
    largest = np.zeros(len(first), dtype=np.int64)
    left = np.arange(len(first))
    for size in np.unique(sizes[sizes > 0])[::-1].tolist():
        counts = members[:, sizes == size].sum(axis=1, dtype=np.int64)
        has = counts[last[left]] != counts[first[left]]
        largest[left[has]] = size
        left = left[~has]
    return largest


def _ranges(begin: Positions, end: Positions) -> Positions:
    """Return the integers of all ranges from ``begin`` to before ``end``, one after another."""
    length = end - begin
    before = np.cumsum(length) - length
    return np.repeat(begin - before, length) + np.arange(int(length.sum()))


def _items(profile: Profile) -> tuple[Bytes, tuple[_Item, ...]]:
    """Return the sizes used by one layer alone, [layers, 5], and those shared by several."""
    sizes: dict[tuple[int, ...], list[int]] = {}
    for entry in list_parameters(profile):
        learned = is_learned(entry)
        held = sizes.setdefault(entry.layers, [0] * 5)
        held[WEIGHTS] += entry.size_bytes
        held[GRADIENTS] += entry.size_bytes * learned
        held[ELEMENTS] += entry.numel * learned
        held[SHAREABLE] += entry.size_bytes * is_shareable(entry)
    for size_bytes, layers in saved_items(profile):
        sizes.setdefault(layers, [0] * 5)[SAVED] += size_bytes
    alone = np.zeros((len(profile.layers), 5), dtype=np.int64)
    shared = []
    for layers, held in sizes.items():
        if len(layers) == 1:
            alone[layers[0]] += held
        elif layers:
            shared.append(_Item(layers, tuple(held)))
    return alone, tuple(shared)
