"""Published partitioning rules, for comparison: equal layers or parameters, torchgpipe, PipeDream.

``positions`` are the layers in front of which a stage may begin, ascending from 0 to the number
of layers; `None` allows every layer. Layers between neighbouring positions stay together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from ...core.errors import InvalidInput
from ...core.profile.profile import Profile
from ..pipedream.objective import pipedream_chain
from .chain_partition import balance

MAX_PIPEDREAM_DEVICES = 128
MAX_PIPEDREAM_SIZE = 10_000
"""Groups of layers times devices. Within both limits the search takes 0.5 s, as measured."""


def equal_layers(
    num_layers: int, num_stages: int, positions: Sequence[int] | None = None
) -> list[int]:
    """Return layers per stage that differ by at most one, larger counts in front.

    If positions do not allow that, the largest count is least, then the sum of squares.
    """
    cuts = _check_positions(positions, num_layers)
    sizes = [last - first for first, last in pairwise(cuts)]
    # `balance` makes the last parts the larger ones, so the chain is reversed before and after.
    return _in_layers(balance(sizes[::-1], num_stages)[::-1], cuts)


def equal_parameters(
    profile: Profile, num_stages: int, positions: Sequence[int] | None = None
) -> list[int]:
    """Return layers per stage with the least largest stage by bytes of parameters.

    A tied weight counts in each of its layers.
    """
    cuts = _check_positions(positions, len(profile.layers))
    sizes = _sums([entry.layer.parameter_bytes for entry in profile.layers], cuts)
    return _in_layers(balance(sizes, num_stages), cuts)


def torchgpipe_balance(
    costs: Sequence[float], num_stages: int, positions: Sequence[int] | None = None
) -> list[int]:
    """Return layers per stage as torchgpipe 0.0.7 balances them.

    Bárány and Grinberg, "Block partitions of sequences" (Israel J. Math. 2015): single items
    move from the largest block towards the smallest until no two blocks differ by more than the
    largest item. torchgpipe first subtracts the least cost from all, which underrates long stages
    of cheap layers, and takes the first of equally small blocks where the paper takes the nearest.
    If several costs equal the least, it may take an item from an empty block, and then overlaps
    blocks or never returns; here the next block gives the item. Results are otherwise equal: a
    stage may even get 0 layers if many costs equal the least.
    """
    cuts = _check_positions(positions, len(costs))
    _check_costs(costs)
    items = _sums(costs, cuts)
    if not 1 <= num_stages <= len(items):
        raise InvalidInput(
            f"cannot cut {len(items)} groups of layers into {num_stages} stages",
            field="/num_stages",
        )
    least, spread = min(items), max(items) - min(items)
    scaled = [(item - least) / spread if spread else 0.0 for item in items]
    return _in_layers(_Blocks(scaled, num_stages).level(), cuts)


def pipedream_plan(
    profile: Profile,
    num_devices: int,
    bandwidth_bytes_per_s: float,
    positions: Sequence[int] | None = None,
) -> tuple[list[int], list[int]] | None:
    """Return layers and replicas per stage by PipeDream's optimizer, which uses every device.

    It sees the profile as a chain of layers with forward and backward times, parameter bytes and
    activation bytes sent forward, but no loss, memory limits or micro-batches. Returns `None`
    beyond `MAX_PIPEDREAM_DEVICES` or `MAX_PIPEDREAM_SIZE`.
    """
    cuts = _check_positions(positions, len(profile.layers))
    groups = len(cuts) - 1
    if num_devices > MAX_PIPEDREAM_DEVICES or groups * num_devices > MAX_PIPEDREAM_SIZE:
        return None
    split = pipedream_chain(
        _sums([entry.forward.median_s + entry.backward.median_s for entry in profile.layers], cuts),
        _sums([entry.layer.parameter_bytes for entry in profile.layers], cuts),
        [profile.boundaries[cut - 1].forward_bytes for cut in cuts[1:-1]],
        (num_devices,),
        (bandwidth_bytes_per_s,),
    )
    counts = _in_layers([len(stage.node_ids) for stage in split.stages], cuts)
    return counts, [stage.replicas for stage in split.stages]


class _Blocks:
    """Consecutive blocks of items of 0 to 1, between which single items move."""

    def __init__(self, items: Sequence[float], num_blocks: int) -> None:
        each = len(items) // num_blocks
        self._items = items
        self._edges = [each * block for block in range(num_blocks)] + [len(items)]
        self._sizes = [self._size(block) for block in range(num_blocks)]

    def level(self) -> list[int]:
        """Move items until no block exceeds another by more than 1; return items per block."""
        # Terminates: items only move away from `top` until it has lost one, and no block that
        # takes an item becomes as large as `top` was.
        while True:
            largest = max(self._sizes)
            top = max(block for block, size in enumerate(self._sizes) if size == largest)
            giver = -1
            while giver != top:
                smallest = min(self._sizes)
                if largest <= smallest + 1:
                    return [last - first for first, last in pairwise(self._edges)]
                giver = self._move(self._sizes.index(smallest), top)

    def _move(self, taker: int, top: int) -> int:
        """Move one item to ``taker`` from its neighbour towards ``top``; return that neighbour."""
        step = 1 if taker < top else -1
        while self._edges[taker + step] == self._edges[taker + step + 1]:  # an empty neighbour
            taker += step
        edge = max(taker, taker + step)
        self._edges[edge] += step
        for block in (taker, taker + step):
            self._sizes[block] = self._size(block)
        return taker + step

    def _size(self, block: int) -> float:
        # Summed from the front, so that rounding decides ties as it does in torchgpipe.
        return sum(self._items[self._edges[block] : self._edges[block + 1]])


def _check_positions(positions: Sequence[int] | None, num_layers: int) -> Sequence[int]:
    """Return the positions, or those of all layers by default."""
    if positions is None:
        return range(num_layers + 1)
    if (
        len(positions) < 2
        or (positions[0], positions[-1]) != (0, num_layers)
        or any(first >= last for first, last in pairwise(positions))
    ):
        raise InvalidInput(
            f"positions must ascend from 0 to the number of layers, {num_layers}, not {positions}",
            field="/positions",
        )
    return positions


def _check_costs(costs: Sequence[float]) -> None:
    for layer, cost in enumerate(costs):
        if not math.isfinite(cost) or cost < 0:
            raise InvalidInput(
                f"costs[{layer}] is {cost}; a cost must be finite and not negative",
                field=f"/costs/{layer}",
            )


def _sums(costs: Sequence[float], cuts: Sequence[int]) -> list[float]:
    return [math.fsum(costs[first:last]) for first, last in pairwise(cuts)]


def _in_layers(group_counts: Sequence[int], cuts: Sequence[int]) -> list[int]:
    """Convert groups per stage to layers per stage."""
    counts, group = [], 0
    for count in group_counts:
        counts.append(cuts[group + count] - cuts[group])
        group += count
    return counts
