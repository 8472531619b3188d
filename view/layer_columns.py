"""Columns of a plan's or a profile's layers, with memory counted as the planner counts it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..core.plan.plan import Plan
from ..core.profile.profile import Profile, list_parameters
from .plan_view import LayerColumns


class LayerMemory:
    """Memory of any set of a profile's layers; what several share counts once."""

    def __init__(self, profile: Profile) -> None:
        count = len(profile.layers)
        weights = [(entry.size_bytes, entry.layers) for entry in list_parameters(profile)]
        kept = [(entry.size_bytes, entry.layers) for entry in profile.storages] or [
            (entry.saved_activation_bytes, (index,)) for index, entry in enumerate(profile.layers)
        ]
        self._weights = _by_layer(weights, count)
        self._kept = _by_layer(kept, count)

    def weights_bytes(self, layers: Iterable[int]) -> int:
        """Sum parameters and buffers, as `weights_bytes` of a plan's stage does."""
        return _sum(self._weights, layers)

    def saved_bytes(self, layers: Iterable[int]) -> int:
        """Sum the activations kept for the backward of one micro-batch, without the loss."""
        return _sum(self._kept, layers)


def _by_layer(
    items: Sequence[tuple[int, tuple[int, ...]]], num_layers: int
) -> list[list[tuple[int, int]]]:
    found: list[list[tuple[int, int]]] = [[] for _ in range(num_layers)]
    for number, (size_bytes, layers) in enumerate(items):
        for layer in layers:
            found[layer].append((number, size_bytes))
    return found


def _sum(used: Sequence[Sequence[tuple[int, int]]], layers: Iterable[int]) -> int:
    # A set of (number, bytes): an item that several of the layers share counts once.
    return sum(size for _, size in {item for layer in layers for item in used[layer]})


def build_layer_columns(
    plan: Plan, profile: Profile | None, held: LayerMemory | None
) -> LayerColumns:
    """Build the columns of a plan's layers: names and stages, with a profile also costs."""
    names = plan.layer_names
    stages = tuple(index for index, stage in enumerate(plan.stages) for _ in stage.layer_names)
    if profile is None or held is None:
        return LayerColumns(names=names, stages=stages)
    return _costs(profile, held).model_copy(update={"names": names, "stages": stages})


def build_profile_layers(profile: Profile) -> LayerColumns:
    """Build the columns of a profile's layers, all in one stage."""
    return _costs(profile, LayerMemory(profile))


def _costs(profile: Profile, held: LayerMemory) -> LayerColumns:
    entries, gaps = profile.layers, profile.boundaries
    each = [(index,) for index in range(len(entries))]
    return LayerColumns(
        names=tuple(entry.layer.name for entry in entries),
        stages=(0,) * len(entries),
        types=tuple(entry.layer.module_type for entry in entries),
        forward_s=tuple(entry.forward.median_s for entry in entries),
        backward_s=tuple(entry.backward.median_s for entry in entries),
        spread_s=tuple(entry.forward.spread_s + entry.backward.spread_s for entry in entries),
        parameter_bytes=tuple(map(held.weights_bytes, each)),
        saved_bytes=tuple(map(held.saved_bytes, each)),
        cut_bytes=(*(gap.forward_bytes + gap.backward_bytes for gap in gaps), 0),
        cut_reasons=(
            *("" if gap.legal else gap.reason or "the profile forbids it" for gap in gaps),
            "the model ends here",
        ),
    )
