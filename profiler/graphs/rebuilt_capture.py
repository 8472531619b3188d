"""A graph without code as a `Captured` whose tensors have shapes but no memory."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from ...capture.captured import Captured
from ...capture.program.constants import constant_nodes
from ...capture.program.cuts import find_cuts
from ...capture.program.layers import Layers
from ...capture.program.program import VALUE, Program, storage_key, tensors_of
from ...capture.sample import CallStructure, dtype_name
from ...capture.serialize.graph_document import list_parameters
from ...capture.tracers.export import silence_loggers
from ...capture.tracers.symbolic import ValueRecorder
from ...core.errors import InvalidInput
from ...core.graph.graph import Boundary, Graph, Parameter
from ...core.graph.tensors import StateTensor
from .graph_module import Skeleton, in_one_line, skeleton
from .random_values import replace_tensors


@dataclass(frozen=True)
class Rebuilt:
    """A graph ready to be run layer by layer, captured with parameters on the meta device.

    ``state`` says what each meta tensor stands for, by identity; ``resident`` are the storages of
    parameters, buffers and inputs, as the nodes' values hold them.
    """

    graph: Graph
    captured: Captured
    state: dict[int, StateTensor]
    resident: frozenset[int]


def rebuild_captured(graph: Graph, device: torch.device) -> Rebuilt:
    """Put a graph together for a device, and find the shape and memory layout of every value."""
    parts = skeleton(graph, device)
    structure = _structure(graph)
    inputs = dict(zip((tensor.name for tensor in graph.inputs), parts.inputs, strict=True))
    program = Program(
        model=parts.model,
        holder=parts.holder,
        graph=parts.graph,
        mode=graph.mode,
        structure=structure,
        inputs=[inputs[name] for name in structure.names],
        out_spec=pytree.tree_flatten([0] * len(graph.returns))[1],
        training=graph.training,
        fixed_mode=graph.fixed_mode,
        notes=list(graph.notes),
    )
    resident = _propagate(parts, graph, device)
    _check_values(parts)
    layers = _layers(parts, program, graph)
    captured = Captured(program, layers, find_cuts(program, layers))
    captured.graph = graph  # modules without weights are not there for it to be found again
    _check_against(graph, captured)
    return Rebuilt(graph, captured, parts.state, resident)


def _structure(graph: Graph) -> CallStructure:
    try:
        structure = CallStructure.from_json(graph.input_structure)
        names = set(structure.names)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidInput(
            "input_structure does not say how the model is called; capture it again",
            field="/input_structure",
        ) from error
    if names != {tensor.name for tensor in graph.inputs} or len(names) != len(structure.names):
        raise InvalidInput("input_structure names other inputs", field="/input_structure")
    return structure


def _propagate(parts: Skeleton, graph: Graph, device: torch.device) -> frozenset[int]:
    """Run every operation on tensors without memory; returns the storages that are there anyway."""
    # Fake tensors have the device they will be on, by which some operators choose their result's
    # type or layout; meta tensors would say meta.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with warnings.catch_warnings(), silence_loggers("torch"), torch.no_grad(), mode:
        warnings.simplefilter("ignore")
        inputs = [
            torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device=device)
            for tensor in graph.inputs
        ]
        # Tensors that say they are on the device stand in for those on the meta device.
        stand_in = cache(lambda tensor: _stand_in(tensor, device))
        with replace_tensors((parts.model, parts.holder), stand_in) as state:
            recorder = ValueRecorder(parts.module())
            try:
                recorder.run(*inputs)
            except Exception as error:
                raise cannot_be_done(recorder.node.name, error) from error
    for node in parts.graph.nodes:
        if node.op != "output":
            node.meta[VALUE] = recorder.values[node.name]
    return frozenset(storage_key(tensor) for tensor in (*inputs, *state))


def cannot_be_done(operation: str, error: Exception) -> InvalidInput:
    """Return the refusal of a graph one of whose operations fails."""
    return InvalidInput(
        f"operation {operation!r} cannot be done on what it is given: {in_one_line(error)}",
        field="/operations",
    )


def _stand_in(tensor: Tensor, device: torch.device) -> Tensor:
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(like, requires_grad=tensor.requires_grad)
    return like


def _check_values(parts: Skeleton) -> None:
    for operation, node in parts.nodes:
        found = [
            (tuple(tensor.shape), dtype_name(tensor.dtype))
            for tensor in tensors_of(node.meta.get(VALUE))
        ]
        stated = [(tensor.shape, tensor.dtype) for tensor in operation.outputs]
        if found != stated:
            raise InvalidInput(
                f"operation {operation.name!r} ({operation.target}) makes {found}, but the graph "
                f"says {stated}",
                field="/operations",
            )


def _layers(parts: Skeleton, program: Program, graph: Graph) -> Layers:
    constant = constant_nodes(program)
    return Layers(
        names=[layer.name for layer in graph.layers],
        paths=[layer.name.partition("@")[0] for layer in graph.layers],
        layer_of={node: operation.layer for operation, node in parts.nodes if node not in constant},
        constant=constant,
    )


def _check_against(graph: Graph, captured: Captured) -> None:
    """Layers run forwards; boundaries, parameters and their bytes are what operations make them."""
    layer_of = captured.layers.layer_of
    for node, layer in layer_of.items():
        # Inputs and constants are of no layer; every layer may read them.
        if any(layer_of.get(source, -1) > layer for source in node.all_input_nodes):
            raise InvalidInput(
                f"operation {node.name!r} reads what a later layer makes", field="/operations"
            )
    # The document's sizes are compared with what its operations give: whoever sent it may be wrong.
    for stated, cut in zip(graph.boundaries, captured.cuts, strict=True):
        if _crossing(stated) != _crossing(cut.boundary):
            raise InvalidInput(
                f"boundary {stated.after} lists other tensors than cross it; capture it again",
                field=f"/boundaries/{stated.after}",
            )
    records = list_parameters(captured.program, captured.layers)
    found = {frozenset(record.names): _costs(record) for record in records}
    if found != {frozenset(record.names): _costs(record) for record in graph.parameters}:
        raise InvalidInput(
            "parameters differ from the state that the operations read; capture it again",
            field="/parameters",
        )
    for index, entry in enumerate(graph.layers):
        owned = [each for each in records if index in each.layers and each.kind == "parameter"]
        if entry.parameter_bytes != sum(each.size_bytes for each in owned):
            raise InvalidInput(
                f"layer {entry.name!r} says {entry.parameter_bytes} bytes of parameters, and its "
                "operations read others; capture it again",
                field=f"/layers/{index}/parameter_bytes",
            )


def _crossing(boundary: Boundary) -> list[tuple[object, ...]]:
    return [(spec.shape, spec.dtype, spec.requires_grad) for spec in boundary.tensors]


def _costs(record: Parameter) -> tuple[object, ...]:
    return record.size_bytes, record.numel, record.layers, record.kind, record.trainable
