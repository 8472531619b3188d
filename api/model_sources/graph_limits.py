"""Size limits of graphs: larger ones would occupy the service without a useful answer.

The operators of a graph are checked wherever one is parsed (`core.graph.rebuildable`).
"""

from __future__ import annotations

from math import prod

from ...core.errors import InvalidInput
from ...core.graph.graph import Graph
from ...core.graph.rebuildable import MAX_ELEMENTS

MAX_LAYERS = 20_000
MAX_OPERATIONS = 50_000
"""A decoder of 126 layers (Llama 3.1 405B) has about 6,000."""
MAX_CROSSING = 500_000
"""Tensors of all boundaries and edges together."""


def check_graph(graph: Graph) -> None:
    """Raise `InvalidInput`, with both numbers, if a graph is over a limit."""
    regions = sum(len(region.operations) for region in graph.regions)
    crossing = sum(len(boundary.tensors) for boundary in graph.boundaries) + len(graph.edges)
    for found, limit, what, field in (
        (len(graph.layers), MAX_LAYERS, "layers", "/layers"),
        (len(graph.operations) + regions, MAX_OPERATIONS, "operations", "/operations"),
        (crossing, MAX_CROSSING, "tensors between layers", "/boundaries"),
    ):
        if found > limit:
            raise InvalidInput(
                f"the graph has {found} {what}, and at most {limit} are accepted; profile the "
                "model where it is, and send the profile",
                field=field,
            )
    for tensor in graph.inputs:
        if prod(tensor.shape) > MAX_ELEMENTS:
            raise InvalidInput(
                f"input {tensor.name[:80]!r} has {prod(tensor.shape)} elements, and at most "
                f"{MAX_ELEMENTS} are accepted; use a smaller micro-batch",
                field="/inputs",
            )


def check_rebuilt(graph: Graph) -> None:
    """Raise `InvalidInput` unless a graph lists its operations, which costing it takes."""
    if graph.rebuildable:
        return
    reasons = graph.not_rebuildable
    where = f" ({reasons[0].layer or reasons[0].operation}: {reasons[0].reason})" if reasons else ""
    raise InvalidInput(
        f"the graph does not list its operations{where[:300]}; profile the model where its code "
        "is ('stagewright profile'), and send the profile",
        field="/rebuildable",
    )
