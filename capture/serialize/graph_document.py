"""Conversion of a traced model to a `Graph`: names, shapes and edges, without weights or code."""

from __future__ import annotations

from pydantic import ValidationError
from torch import Tensor, fx

from ...core.graph.graph import MODEL_INPUT, Edge, Graph, Layer, NotRebuildable, Parameter
from ..program.cuts import Cut, differentiable_nodes
from ..program.layers import Layers, explain_opaque, find_readers, find_state
from ..program.program import Program, is_inside, tensors_of, value_of
from ..sample import tensor_spec
from .portable_graph import PortableGraph, iterate_state, write_portable_graph


def graph_document(program: Program, layers: Layers, cuts: list[Cut]) -> Graph:
    """Build the document with all that the planner and the profiler need of a traced model."""
    parameters = list_parameters(program, layers)
    written = write_portable_graph(program, layers)
    graph = Graph(
        model=type(program.model).__name__,
        mode=program.mode,
        training=program.training,
        inputs=tuple(
            tensor_spec(name, value_of(node))
            for name, node in zip(program.structure.names, program.inputs, strict=True)
        ),
        outputs=tuple(
            tensor_spec(node.name, value_of(node))
            for node in program.flat_outputs
            if isinstance(node, fx.Node) and isinstance(value_of(node), Tensor)
        ),
        layers=tuple(_layer(program, layers, index, parameters) for index in range(len(layers))),
        edges=tuple(_edges(program, layers)),
        boundaries=tuple(cut.boundary for cut in cuts),
        parameters=parameters,
        operations=tuple(
            operation.model_copy(update={"arguments": (), "keywords": {}})
            for operation in written.operations
        ),
        not_rebuildable=tuple(written.refusals),
        fixed_mode=program.fixed_mode,
        chain_break=program.chain_break,
        notes=(
            *program.notes,
            *(f"stays in training mode, also after .eval(): {what}" for what in program.fixed_mode),
        ),
    )
    return graph if written.refusals else _with_means_to_run(graph, program, written)


def _with_means_to_run(graph: Graph, program: Program, written: PortableGraph) -> Graph:
    """Add what it takes to run the graph; leave it unchanged if the result is not valid."""
    means = {
        "rebuildable": True,
        "operations": tuple(written.operations),
        "modules": tuple(written.modules.values()),
        "state": tuple(written.state.values()),
        "regions": tuple(written.regions),
        "returns": tuple(written.returns),
        "output_paths": written.output_paths,
        "input_structure": program.structure.to_json(),
        "sample": written.sample,
    }
    try:
        return Graph.model_validate({**dict(graph), **means})
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        return graph.model_copy(update={"not_rebuildable": (NotRebuildable(reason=reason),)})


def list_parameters(program: Program, layers: Layers) -> tuple[Parameter, ...]:
    """List parameters and buffers once each, with all their names and the layers reading them."""
    readers = find_readers(program, layers)
    return tuple(
        Parameter(
            names=names,
            size_bytes=tensor.numel() * tensor.element_size(),
            numel=tensor.numel(),
            layers=tuple(sorted(readers.get(id(tensor), ()))),
            kind=kind,
            trainable=kind == "parameter" and tensor.requires_grad,
        )
        for names, tensor, kind in iterate_state(program.model)
    )


def _layer(
    program: Program, layers: Layers, index: int, parameters: tuple[Parameter, ...]
) -> Layer:
    path = layers.paths[index]
    used = [record for record in parameters if index in record.layers]
    names = (
        next((name for name in record.names if is_inside(name, path)), record.names[0])
        for record in used
    )
    return Layer(
        name=layers.names[index],
        module_type=type(program.model.get_submodule(path)).__name__,
        module_fqns=tuple(sorted({name.rpartition(".")[0] for name in names})),
        parameter_bytes=sum(record.size_bytes for record in used if record.kind == "parameter"),
        opaque=explain_opaque(program, layers, index),
        stateful=find_state(program, layers, index),
    )


def _edges(program: Program, layers: Layers) -> list[Edge]:
    differentiable = differentiable_nodes(program)
    inputs = set(program.inputs)
    edges = []
    for node in program.graph.nodes:
        source = MODEL_INPUT if node in inputs else layers.layer_of.get(node)
        if source is None:
            continue
        targets = {layers.layer_of[user] for user in node.users if user in layers.layer_of}
        for target in sorted(target for target in targets if target > source):
            for tensor in tensors_of(value_of(node)):
                spec = tensor_spec(node.name, tensor, requires_grad=node in differentiable)
                edges.append(Edge(source=source, target=target, tensor=spec))
    return edges
