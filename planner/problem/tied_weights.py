"""Weights shared by several layers: where their owners may be, and what that costs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product

import numpy as np

from ..cost.device_classes import Devices
from ..cost.stage_table import Mask, StageTable

MAX_PATTERNS = 32
"""How many ways to spread tied weights are tried apart; beyond, the bound leaves ties out."""


@dataclass(frozen=True)
class TiePattern:
    """For each pair of layers that use a weight one after the other: one stage, or two.

    Attributes:
        together: Pairs of layers that share a stage.
        apart: Pairs of layers in different stages.
        least_sync_s: The gradients' summing takes at least this long.
    """

    together: tuple[tuple[int, int], ...]
    apart: tuple[tuple[int, int], ...]
    least_sync_s: float

    def allows(self, tables: StageTable) -> Mask:
        """Which stages respect the pattern, shape (E,)."""
        mask = np.ones(len(tables.first), dtype=np.bool_)
        for one, other in self.together:
            mask &= tables.holds(one) == tables.holds(other)
        for one, other in self.apart:
            mask &= ~(tables.holds(one) & tables.holds(other))
        return mask


def tie_patterns(tables: StageTable, devices: Devices) -> list[TiePattern]:
    """Every way to spread the tied weights over stages, the cheapest first.

    Weights used by the same layers move together. Where there are more than `MAX_PATTERNS`
    ways, the weights that cost the most are told apart and the rest count as free, which keeps
    `least_sync_s` a lower bound.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for parameter in tables.tied:
        groups.setdefault(parameter.layers, []).append(parameter.size_bytes)
    told_apart: list[tuple[int, ...]] = []
    ways = 1
    for layers in sorted(groups, key=lambda key: (-sum(groups[key]), key)):
        if ways << (len(layers) - 1) <= MAX_PATTERNS:
            ways <<= len(layers) - 1
            told_apart.append(layers)
    choices = [
        [(layers, split) for split in product((False, True), repeat=len(layers) - 1)]
        for layers in told_apart
    ]
    most_owners = None if tables.keeps_order else 2  # where the third may join the first again
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
        owners = owners if most_owners is None else min(owners, most_owners)
        for size_bytes in groups[layers]:
            least_sync_s += _least_sync_s(devices, size_bytes, owners)
    return TiePattern(tuple(together), tuple(apart), least_sync_s)


def _least_sync_s(devices: Devices, size_bytes: int, num_owners: int) -> float:
    """Over the fastest link that could join the owners."""
    links = devices.cluster.levels
    if num_owners < 2 or not links:
        return 0.0
    return min(link.all_reduce_time_s(size_bytes, num_owners) for link in links)
