"""A captured graph as plain text: one row a layer, and what a cut behind it would send."""

from __future__ import annotations

from collections import Counter

from ..core.graph import Boundary, Graph
from ..core.text_table import printable, text_table
from ..core.units import count, format_bytes

HEADINGS = ("layer", "module", "operations", "parameters", "a cut behind sends", "")


def graph_table(graph: Graph) -> str:
    """What ``stagewright show`` prints of a graph."""
    operations = Counter(entry.layer for entry in graph.operations)
    cuts: list[Boundary | None] = [*graph.boundaries, None]
    rows: list[tuple[str, ...]] = [
        (
            layer.name,
            layer.module_type,
            str(operations[index]) if operations else "",
            format_bytes(layer.parameter_bytes),
            _cut(cut),
            f"OPAQUE: {layer.opaque}" if layer.opaque else "",
        )
        for index, (layer, cut) in enumerate(zip(graph.layers, cuts, strict=True))
    ]
    if not any(layer.opaque for layer in graph.layers):
        rows = [row[:-1] for row in rows]
    trained = [one for one in graph.parameters if one.kind == "parameter"]
    tied = sum(len(one.names) > 1 for one in trained)
    lines = [
        f"{printable(graph.model)}, captured by {graph.mode} in "
        f"{'training' if graph.training else 'evaluation'} mode",
        f"{count(len(graph.layers), 'layer')}, "
        f"{count(sum(entry.legal for entry in graph.boundaries), 'legal cut')}, "
        f"{format_bytes(sum(one.size_bytes for one in trained))} of parameters"
        + (f", {tied} of them tied" if tied else ""),
        f"id {graph.content_id()}",
        *map(printable, graph.notes),
    ]
    return "\n".join([text_table([HEADINGS[: len(rows[0])], *rows]), "", *lines])


def _cut(cut: Boundary | None) -> str:
    if cut is None:
        return ""
    if not cut.legal:
        return f"no cut: {cut.reason}" if cut.reason else "no cut"
    return f"{format_bytes(cut.forward_bytes)}, {format_bytes(cut.backward_bytes)} back"
