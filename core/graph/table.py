"""Plain-text table of a graph: a row per layer, with the data that a cut after it would send."""

from __future__ import annotations

from collections import Counter

from ..text_table import format_table, sanitize, truncate
from ..units import count, format_bytes
from .graph import Boundary, Graph

HEADINGS = ("layer", "module", "operations", "parameters", "a cut behind sends", "")

MOST_REASON = 100
"""Most characters shown of the reason why a layer is opaque."""


def format_graph(graph: Graph) -> str:
    """Format a graph as `print(graph)` and ``stagewright show`` show it."""
    operations = Counter(entry.layer for entry in graph.operations)
    cuts: list[Boundary | None] = [*graph.boundaries, None]
    rows: list[tuple[str, ...]] = [
        (
            layer.name,
            layer.module_type,
            str(operations[index]) if operations else "",
            format_bytes(layer.parameter_bytes),
            _cut(cut),
            f"OPAQUE: {truncate(layer.opaque, MOST_REASON)}" if layer.opaque else "",
        )
        for index, (layer, cut) in enumerate(zip(graph.layers, cuts, strict=True))
    ]
    if not any(layer.opaque for layer in graph.layers):
        rows = [row[:-1] for row in rows]
    trained = [one for one in graph.parameters if one.kind == "parameter"]
    tied = sum(len(one.names) > 1 for one in trained)
    lines = [
        f"{sanitize(graph.model)}, captured by {graph.mode} in "
        f"{'training' if graph.training else 'evaluation'} mode",
        f"{count(len(graph.layers), 'layer')}, "
        f"{count(sum(entry.legal for entry in graph.boundaries), 'legal cut')}, "
        f"{format_bytes(sum(one.size_bytes for one in trained))} of parameters"
        + (f", {tied} of them tied" if tied else ""),
        f"id {graph.content_id()}",
        *map(sanitize, graph.notes),
        *explain_not_rebuildable(graph),
    ]
    return "\n".join([format_table([HEADINGS[: len(rows[0])], *rows]), "", *lines])


def _cut(cut: Boundary | None) -> str:
    if cut is None:
        return ""
    if not cut.legal:
        return f"no cut: {cut.reason}" if cut.reason else "no cut"
    return f"{format_bytes(cut.forward_bytes)}, {format_bytes(cut.backward_bytes)} back"


def explain_not_rebuildable(graph: Graph) -> list[str]:
    """Return the first reason why a graph cannot be rebuilt, as a line; empty if it can."""
    if graph.rebuildable:
        return []
    reasons = graph.not_rebuildable
    text = "cannot be measured without the model's code"
    if reasons:
        where = f", in {reasons[0].layer}" if reasons[0].layer else ""
        more = f" (and {count(len(reasons) - 1, 'more reason')})" if len(reasons) > 1 else ""
        text += f": {reasons[0].reason}{where}{more}"
    return [sanitize(text)]
