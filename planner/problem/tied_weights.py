"""Tied weights: the ways to spread their layers over stages, and a bound on each one's cost."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np

from ..cost.chain import Mask, StageTable
from ..cost.device_classes import Devices

MAX_PATTERNS = 32
"""Ways to spread tied weights that are searched separately; beyond, the bound ignores ties."""


@dataclass(frozen=True)
class TiePattern:
    """Choice of one stage or two for each pair of consecutive layers of a tied weight.

    Pairs of layers share a stage (``together``) or do not (``apart``); summing the tied gradients
    takes at least ``least_sync_s``.
    """

    together: tuple[tuple[int, int], ...]
    apart: tuple[tuple[int, int], ...]
    least_sync_s: float

    def allows(self, tables: StageTable) -> Mask:
        """Return True for the stages that respect the pattern, shape (E,)."""
        mask = np.ones(len(tables.first), dtype=np.bool_)
        for one, other in self.together:
            mask &= tables.holds(one) == tables.holds(other)
        for one, other in self.apart:
            mask &= ~(tables.holds(one) & tables.holds(other))
        return mask


def tie_patterns(tables: StageTable, devices: Devices) -> list[TiePattern]:
    """Return every way to spread tied weights over stages, the cheapest first.

    Weights used by the same layers move together. Beyond `MAX_PATTERNS` ways, only the most
    expensive weights are distinguished and the rest is free, so `least_sync_s` stays a bound.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for parameter in tables.tied:
        groups.setdefault(parameter.layers, []).append(parameter.size_bytes)
    distinguished: list[tuple[int, ...]] = []
    ways = 1
    for layers in sorted(groups, key=lambda key: (-sum(groups[key]), key)):
        if ways << (len(layers) - 1) <= MAX_PATTERNS:
            ways <<= len(layers) - 1
            distinguished.append(layers)
    choices = [
        [(layers, split) for split in product((False, True), repeat=len(layers) - 1)]
        for layers in distinguished
    ]
    # In a layer graph, a third layer may be in the first one's stage again: two owners at least.
    most_owners = None if tables.keeps_order else 2
    patterns = [_pattern(devices, groups, choice, most_owners) for choice in product(*choices)]
    return sorted(patterns, key=lambda pattern: pattern.least_sync_s)


def _pattern(
    devices: Devices,
    groups: dict[tuple[int, ...], list[int]],
    choice: tuple[tuple[tuple[int, ...], tuple[bool, ...]], ...],
    most_owners: int | None,
) -> TiePattern:
    together: list[tuple[int, int]] = []
    apart: list[tuple[int, int]] = []
    least_sync_s = 0.0
    for layers, split in choice:
        for pair, is_cut in zip(pairwise(layers), split, strict=True):
            (apart if is_cut else together).append(pair)
        owners = 1 + sum(split)
        fewest = owners if most_owners is None else min(owners, most_owners)
        counts = range(fewest, owners + 1)
        for size_bytes in groups[layers]:
            least_sync_s += _least_sync_s(devices, size_bytes, counts)
    return TiePattern(tuple(together), tuple(apart), least_sync_s)


def _least_sync_s(devices: Devices, size_bytes: int, counts: range) -> float:
    # A bound for any placement: the owners may be joined by the fastest link of the cluster. In a
    # layer graph their number is not known exactly, and more owners may take less.
    links = devices.bounding_cluster.levels
    return min(
        (link.all_reduce_time_s(size_bytes, owners) for link in links for owners in counts),
        default=0.0,
    )
