"""The model as boxes: folded by module, a column a stage."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..core.graph import MODEL_INPUT
from ..core.module_tree import ModuleNode, module_tree
from ..core.plan import Plan
from ..core.profile import Profile
from .plan_view import GraphEdge, GraphNode, GraphView

MAX_BOXES = 14
"""In one column. Modules are opened from the outside in as long as so many are enough."""


def graph_of(plan: Plan, profile: Profile | None) -> GraphView:
    """The boxes of every stage in order, and what goes between them."""
    nodes: list[GraphNode] = []
    owner: list[int] = []  # of each layer the box it is in
    for number, stage in enumerate(plan.stages):
        first = stage.first_layer
        classes = () if profile is None else _classes(profile, first, stage.num_layers)
        for found in _opened(module_tree(stage.layer_names, classes)):
            layers = sorted(first + index for index in found.layers)
            owner += [len(nodes)] * len(layers)
            nodes.append(_node(number, found, layers, profile))
    return GraphView(nodes=tuple(nodes), edges=tuple(_edges(plan, profile, owner)))


def _classes(profile: Profile, first: int, count: int) -> tuple[str, ...]:
    return tuple(entry.layer.cost_class for entry in profile.layers[first : first + count])


def _opened(nodes: Sequence[ModuleNode]) -> list[ModuleNode]:
    """Modules opened level by level while there are few boxes; equal neighbours stay one."""
    shown = list(nodes)
    while True:
        more = [
            part
            for node in shown
            for part in (_parts(node) if node.children and node.repeats == 1 else (node,))
        ]
        if len(more) == len(shown) or len(more) > MAX_BOXES or not _in_order(more):
            return _in_runs(shown)
        shown = more


def _parts(node: ModuleNode) -> list[ModuleNode]:
    """The parts of a module under their whole names."""
    return [replace(part, name=f"{node.name}.{part.name}") for part in node.children]


def _in_order(nodes: Sequence[ModuleNode]) -> bool:
    """Whether each holds the layers right behind those of the one before."""
    runs = [sorted(node.layers) for node in nodes]
    return all(
        run[-1] - run[0] + 1 == len(run) and (not place or runs[place - 1][-1] + 1 == run[0])
        for place, run in enumerate(runs)
    )


def _in_runs(nodes: Sequence[ModuleNode]) -> list[ModuleNode]:
    """At most `MAX_BOXES`: too many are put together, and so are modules that interleave."""
    if not _in_order(nodes):
        layers = tuple(sorted(index for node in nodes for index in node.layers))
        names = [node.name for node in nodes]
        return [ModuleNode(", ".join(names[:3]) + ", ..." * (len(names) > 3), layers)]
    if len(nodes) <= MAX_BOXES:
        return list(nodes)
    size = -(-len(nodes) // MAX_BOXES)
    groups = [nodes[start : start + size] for start in range(0, len(nodes), size)]
    return [
        group[0]
        if len(group) == 1
        else ModuleNode(
            f"{group[0].name} … {group[-1].name}",
            tuple(index for node in group for index in node.layers),
        )
        for group in groups
    ]


def _node(
    stage: int, found: ModuleNode, layers: Sequence[int], profile: Profile | None
) -> GraphNode:
    entries = [] if profile is None else [profile.layers[index] for index in layers]
    return GraphNode(
        stage=stage,
        name=found.name,
        num_layers=len(layers),
        repeats=found.repeats,
        time_s=sum(entry.forward.median_s + entry.backward.median_s for entry in entries)
        if entries
        else None,
        parameter_bytes=sum(entry.layer.parameter_bytes for entry in entries) if entries else None,
    )


def _edges(plan: Plan, profile: Profile | None, owner: Sequence[int]) -> Iterator[GraphEdge]:
    """Between boxes in a row, with the bytes of cuts; then what skips boxes."""
    starts = [stage.first_layer for stage in plan.stages]
    for layer in range(1, len(owner)):
        before, after = owner[layer - 1], owner[layer]
        if before == after:
            continue
        stage = bisect_right(starts, layer) - 1
        crosses = stage > 0 and starts[stage] == layer
        sent = plan.stages[stage - 1].send_forward_bytes if crosses else None
        yield GraphEdge(source=before, target=after, size_bytes=sent)
    if profile is None or plan.layer_order:
        return
    far: dict[tuple[int, int], int] = {}
    for edge in profile.edges:
        if edge.source == MODEL_INPUT:
            continue
        pair = owner[edge.source], owner[edge.target]
        if pair[1] > pair[0] + 1:
            far[pair] = far.get(pair, 0) + edge.tensor.size_bytes
    for (source, target), size_bytes in far.items():
        yield GraphEdge(source=source, target=target, size_bytes=size_bytes)
