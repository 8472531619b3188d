"""Skip connections: values read by later stages, sent directly instead of relayed.

A value goes from each stage that makes or reads it to the next one that reads it, so no stage
sends it twice and none holds it in vain; `runtime.partition.routes` sends it so.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ...core.graph.graph import MODEL_INPUT
from ...core.graph.tensors import TensorSpec
from ...core.profile.profile import Profile


@dataclass(frozen=True)
class SkipValue:
    """A tensor that is read beyond the layer after the one that makes it.

    Attributes:
        name: Its name at every boundary.
        layers: Those that make and read it, ascending; the first makes the model's own inputs, the
            last reads what the model returns.
        forward_bytes: Its size.
        backward_bytes: That of its gradient, if it has one.
    """

    name: str
    layers: tuple[int, ...]
    forward_bytes: int
    backward_bytes: int


@dataclass(frozen=True)
class SkipConnection:
    """The values one stage sends directly to a later, non-adjacent stage, per micro-batch."""

    source: int
    target: int
    values: tuple[SkipValue, ...]

    @property
    def forward_bytes(self) -> int:
        return sum(value.forward_bytes for value in self.values)

    @property
    def backward_bytes(self) -> int:
        return sum(value.backward_bytes for value in self.values)


def find_skip_values(profile: Profile) -> tuple[SkipValue, ...] | None:
    """Return the values that could bypass a stage; None if their readers are unknown."""
    tensors, layers = _uses(profile)
    if not _accounts_for_boundaries(profile, layers):
        return None
    return tuple(
        SkipValue(
            name,
            tuple(sorted(used)),
            tensors[name].size_bytes,
            tensors[name].size_bytes * tensors[name].requires_grad,
        )
        for name, used in layers.items()
        if max(used) - min(used) > 1
    )


def find_skips(values: Iterable[SkipValue], cuts: Sequence[int]) -> tuple[SkipConnection, ...]:
    """Return the skip connections between stages with these cuts, sorted by source and target."""
    found: dict[tuple[int, int], list[SkipValue]] = {}
    for value in values:
        stages = dict.fromkeys(bisect_right(cuts, layer) - 1 for layer in value.layers)
        for source, target in pairwise(stages):
            if target > source + 1:
                found.setdefault((source, target), []).append(value)
    return tuple(SkipConnection(*pair, tuple(found[pair])) for pair in sorted(found))


def bytes_over_cut(skips: Iterable[SkipConnection], stage: int) -> tuple[int, int]:
    """Return the bytes there and back that cross a stage's outgoing cut but are sent directly."""
    return _summed(skip for skip in skips if skip.source <= stage < skip.target)


def bytes_past_stage(skips: Iterable[SkipConnection], stage: int) -> tuple[int, int]:
    """Return the bytes there and back that a stage would hold only to relay them."""
    return _summed(skip for skip in skips if skip.source < stage < skip.target)


def _summed(skips: Iterable[SkipConnection]) -> tuple[int, int]:
    chosen = tuple(skips)
    return sum(one.forward_bytes for one in chosen), sum(one.backward_bytes for one in chosen)


def _uses(profile: Profile) -> tuple[dict[str, TensorSpec], dict[str, set[int]]]:
    """Return, by name, the tensors that cross boundaries and the layers that make or read them."""
    tensors = {spec.name: spec for gap in profile.boundaries for spec in gap.tensors}
    layers: dict[str, set[int]] = {name: set() for name in tensors}
    for edge in profile.edges:
        if edge.tensor.name in layers:
            source = 0 if edge.source == MODEL_INPUT else edge.source
            layers[edge.tensor.name] |= {source, edge.target}
    last = len(profile.layers) - 1
    for gap in profile.boundaries:
        for name in (spec.name for spec in gap.tensors):
            if not layers[name]:
                layers[name].add(gap.after)
            if max(layers[name]) <= gap.after:  # read by no layer behind: the model returns it
                layers[name].add(last)
    return tensors, layers


def _accounts_for_boundaries(profile: Profile, layers: dict[str, set[int]]) -> bool:
    """Return True if the edges explain the tensors at every legal boundary."""
    begins: dict[int, list[str]] = {}
    ends: dict[int, list[str]] = {}
    for name, used in layers.items():
        begins.setdefault(min(used), []).append(name)
        ends.setdefault(max(used), []).append(name)
    live: set[str] = set()
    for gap in profile.boundaries:
        live.update(begins.get(gap.after, ()))
        live.difference_update(ends.get(gap.after, ()))
        if gap.legal and live != {spec.name for spec in gap.tensors}:
            return False
    return bool(profile.edges)
