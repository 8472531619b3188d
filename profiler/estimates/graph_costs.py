"""Work of a graph's layers, from its operations rebuilt on the meta device."""

from __future__ import annotations

from collections import Counter

import torch

from ...core.cluster.accelerators import Precision
from ...core.errors import InvalidInput, MeasurementError, first_line
from ...core.graph.graph import Graph
from ..graphs.rebuilt_capture import rebuild_captured
from .estimate import EstimateTarget
from .layer_costs import ModelWork, captured_work
from .meta_copies import META
from .settings_match import FLOATING, TENSORS


def graph_precision(graph: Graph, asked: Precision | None = None) -> Precision | None:
    """Return the precision asked for if the graph's floating state is of it, else that state's."""
    types = Counter(tensor.dtype for tensor in graph.state if tensor.dtype in FLOATING)
    if not types:
        return asked
    found = types.most_common(1)[0][0]
    fitting = [name for name, dtype in TENSORS.items() if dtype == found]
    if not fitting or (asked is not None and asked not in fitting):
        wanted = f", not of {asked}" if asked is not None else ""
        raise InvalidInput(
            f"the graph's weights are of {found}{wanted}; capture the model converted to the type "
            "it is to be estimated in",
            field="/precision",
        )
    return asked or fitting[0]


def graph_work(graph: Graph, wanted: EstimateTarget) -> ModelWork:
    """Count the work of a graph's layers for one micro-batch, without the unknown loss."""
    captured = rebuild_captured(graph, META).captured
    shapes = {tensor.name: tensor for tensor in graph.inputs}
    flat = [
        torch.empty(shapes[name].shape, dtype=getattr(torch, shapes[name].dtype), device=META)
        for name in captured.program.structure.names
    ]
    try:
        return captured_work(
            captured,
            captured.program.model,
            flat,
            backend=wanted.device.backend,
            winograd=wanted.winograd,
        )
    except MeasurementError as error:
        raise InvalidInput(
            f"the graph cannot be estimated: {first_line(error)}", field="/operations"
        ) from error
