"""Model graph: layers folded into modules that open, one column per stage."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.graph.graph import MODEL_INPUT
from ..core.plan.plan import Plan
from ..core.profile.profile import Profile
from .layer_columns import LayerMemory
from .module_parts import ModulePart, ModuleParts, choose_open_parts
from .plan_view import GraphView

MAX_BOXES = 14
"""In one column at first."""

Row = tuple[ModulePart, int]
"""A box that opens, and the row of the box it is in; -1 for none."""


def build_graph_view(plan: Plan, profile: Profile | None, held: LayerMemory | None) -> GraphView:
    """Build the modules of every stage in order, and the skip connections."""
    classes = () if profile is None else [entry.layer.cost_class for entry in profile.layers]
    found = ModuleParts(plan.layer_names, classes)
    rows: list[Row] = []
    open_at_first: set[ModulePart] = set()
    for stage in plan.stages:
        parts = found.between(stage.first_layer, stage.first_layer + stage.num_layers)
        open_at_first |= choose_open_parts(parts, MAX_BOXES)
        _add(rows, parts, -1)
    boxes = [part for part, _ in rows]
    times_s, weights = _costs(profile, held, boxes) if profile and held else ((), ())
    skips = {} if profile is None or plan.layer_order else _skips(profile)
    return GraphView(
        names=tuple(part.name for part in boxes),
        parents=tuple(parent for _, parent in rows),
        first_layers=tuple(part.first for part in boxes),
        num_layers=tuple(part.count for part in boxes),
        repeats=tuple(part.repeats for part in boxes),
        is_open=tuple(part in open_at_first for part in boxes),
        time_s=times_s,
        parameter_bytes=weights,
        cut_bytes=tuple(stage.send_forward_bytes for stage in plan.stages[:-1]),
        skip_sources=tuple(source for source, _ in skips),
        skip_targets=tuple(target for _, target in skips),
        skip_bytes=tuple(skips.values()),
    )


def _add(rows: list[Row], parts: Sequence[ModulePart], parent: int) -> None:
    for part in parts:
        if part.parts:
            rows.append((part, parent))
            _add(rows, part.parts, len(rows) - 1)


def _costs(
    profile: Profile, held: LayerMemory, boxes: Sequence[ModulePart]
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    layer_s = [entry.forward.median_s + entry.backward.median_s for entry in profile.layers]
    return (
        tuple(sum(layer_s[part.first : part.first + part.count]) for part in boxes),
        tuple(held.weights_bytes(range(part.first, part.first + part.count)) for part in boxes),
    )


def _skips(profile: Profile) -> dict[tuple[int, int], int]:
    found: dict[tuple[int, int], int] = {}
    for edge in profile.edges:
        if edge.source != MODEL_INPUT and edge.target > edge.source + 1:
            pair = edge.source, edge.target
            found[pair] = found.get(pair, 0) + edge.tensor.size_bytes
    return found
