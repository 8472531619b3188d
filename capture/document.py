"""A traced model written down as a `Graph`: names, shapes and edges, no weights, no code."""

from __future__ import annotations

from torch import Tensor, fx, nn

from ..core.graph import MODEL_INPUT, Edge, Graph, Layer, Operation, Parameter
from .cuts import Cut, differentiable_nodes
from .layers import Layers
from .program import Program, path_of, resolve, tensors_of, value_of
from .sample import tensor_spec


def graph_document(program: Program, layers: Layers, cuts: list[Cut]) -> Graph:
    """Everything the planner and the profiler need to know of a traced model."""
    parameters = parameter_records(program, layers)
    return Graph(
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
        operations=tuple(_operations(program, layers)),
        fixed_mode=program.fixed_mode,
        notes=(
            *program.notes,
            *(f"stays in training mode, also after .eval(): {what}" for what in program.fixed_mode),
        ),
    )


def parameter_records(program: Program, layers: Layers) -> tuple[Parameter, ...]:
    """Parameters and buffers, each storage once with all its names and the layers reading it."""
    readers = _readers(program, layers)
    model = program.model
    records: list[Parameter] = []
    for kind, named in (
        ("parameter", model.named_parameters(remove_duplicate=False)),
        ("buffer", model.named_buffers(remove_duplicate=False)),
    ):
        names: dict[int, list[str]] = {}
        tensors: dict[int, Tensor] = {}
        for name, tensor in named:
            names.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = tensor
        for key, tensor in tensors.items():
            records.append(
                Parameter(
                    names=tuple(names[key]),
                    size_bytes=tensor.numel() * tensor.element_size(),
                    numel=tensor.numel(),
                    layers=tuple(sorted(readers.get(key, ()))),
                    kind="parameter" if kind == "parameter" else "buffer",
                    trainable=kind == "parameter" and tensor.requires_grad,
                )
            )
    return tuple(records)


def _readers(program: Program, layers: Layers) -> dict[int, set[int]]:
    """Layers reading each parameter or buffer, by the tensor's identity."""
    readers: dict[int, set[int]] = {}
    for node, layer in layers.layer_of.items():
        if node.op == "call_module":
            module = program.attribute(str(node.target))
            for tensor in (*module.parameters(), *module.buffers()):
                readers.setdefault(id(tensor), set()).add(layer)
        for source in node.all_input_nodes:
            if source.op == "get_attr":
                value = program.attribute(str(source.target))
                readers.setdefault(id(value), set()).add(layer)
    return readers


def _layer(
    program: Program, layers: Layers, index: int, parameters: tuple[Parameter, ...]
) -> Layer:
    path = layers.paths[index]
    used = [record for record in parameters if index in record.layers]
    fqns = {
        next((name for name in record.names if _inside(name, path)), record.names[0]).rpartition(
            "."
        )[0]
        for record in used
    }
    return Layer(
        name=layers.names[index],
        module_type=type(resolve(program.model, path) if path else program.model).__name__,
        module_fqns=tuple(sorted(fqns)),
        parameter_bytes=sum(record.size_bytes for record in used if record.kind == "parameter"),
    )


def _inside(name: str, path: str) -> bool:
    return not path or name.startswith(f"{path}.")


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


def _operations(program: Program, layers: Layers) -> list[Operation]:
    operations = []
    for node in program.graph.nodes:
        if node in layers.layer_of:
            operations.append(
                Operation(
                    name=node.name,
                    target=_target(node, program.model),
                    kind="module" if node.op == "call_module" else "function",
                    inputs=tuple(source.name for source in node.all_input_nodes),
                    outputs=tuple(
                        tensor_spec(node.name, item) for item in tensors_of(value_of(node))
                    ),
                    layer=layers.layer_of[node],
                )
            )
    return operations


def _target(node: fx.Node, model: nn.Module) -> str:
    if node.op in ("call_module", "call_method"):
        return str(node.target)
    name = str(node.target) if hasattr(node.target, "_schema") else ""
    return name or f"{getattr(node.target, '__name__', node.target)} in {path_of(node) or 'model'}"
