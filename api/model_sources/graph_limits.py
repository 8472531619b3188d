"""How large a graph this service takes: more would keep it busy, or its answer would be of no use.

What a graph may *do* is checked wherever one is read (`core.rebuildable`).
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
"""Tensors over all boundaries and edges."""


def check_graph(graph: Graph) -> None:
    """Refuse a graph that is too large for this service.

    Raises:
        InvalidInput: It is; the message has both numbers.
    """
    regions = sum(len(region.operations) for region in graph.regions)
    crossing = sum(len(boundary.tensors) for boundary in graph.boundaries) + len(graph.edges)
    for found, limit, what, field in (
        (len(graph.layers), MAX_LAYERS, "layers", "/layers"),
        (len(graph.operations) + regions, MAX_OPERATIONS, "operations", "/operations"),
        (crossing, MAX_CROSSING, "tensors between layers", "/boundaries"),
    ):
        if found > limit:
            raise InvalidInput(
                f"the graph has {found} {what}, and this service takes at most {limit}; profile "
                "the model where it is, and send the profile",
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
    """Refuse a graph that does not say how to run it, and so what it costs.

    Raises:
        InvalidInput: It does not; the message says what stood in the way.
    """
    if graph.rebuildable:
        return
    reasons = graph.not_rebuildable
    where = f" ({reasons[0].layer or reasons[0].operation}: {reasons[0].reason})" if reasons else ""
    raise InvalidInput(
        f"the graph lists no operations that can be looked at{where[:300]}; profile the model "
        "where its code is ('stagewright profile'), and send the profile",
        field="/rebuildable",
    )
