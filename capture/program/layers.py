"""Assignment of operations to layers: runs of the author's own modules, in execution order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from torch import fx, nn

from ...core.document import MAX_NOTE
from ...core.text_table import truncate
from ..blocks import ModuleTree
from .constants import constant_nodes
from .mutation import changed_storages, is_random, mutated_inputs
from .program import (
    CALL,
    FUNCTION,
    OPAQUE,
    Program,
    find_module,
    modules_called,
    path_of,
    references_of,
    storages_of,
)

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass
class Layers:
    """Layers in execution order, by name and path; the second run of a module carries ``@1``.

    Constants and attributes are in no layer: they belong to every layer that reads them.
    """

    names: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    layer_of: dict[fx.Node, int] = field(default_factory=dict)
    constant: set[fx.Node] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self.names)


def assign_layers(program: Program) -> Layers:
    """Divide the graph into runs of blocks; operations between blocks join the run that feeds them.

    An operation that works in place, or draws random numbers, stays in the layer where it happens
    (the update of a buffer: after the last read of it), and reads of changed memory stay after the
    change.
    """
    constant = constant_nodes(program)
    nodes = [
        node for node in program.graph.nodes if node.op.startswith("call_") and node not in constant
    ]
    blocks = block_paths(program.model, nodes, program.opaque)
    layers = Layers(constant=constant)
    seen: Counter[str] = Counter()
    previous: tuple[str, str] | None = None
    waiting: list[fx.Node] = []
    changed_in: dict[int, int] = {}  # storage -> last layer that changed it in place
    read_in: dict[str, int] = {}  # parameter or buffer -> last layer that read it so far
    for node in nodes:
        block = _block_of(path_of(node), blocks)
        if block is not None:
            call = (block, _call_of(node, block))
            if call != previous:
                suffix = f"@{seen[block]}" if seen[block] else ""
                layers.names.append(block + suffix)
                layers.paths.append(block)
                seen[block] += 1
                previous = call
            layers.layer_of[node] = len(layers) - 1
        else:
            feeding = [
                layers.layer_of[source] for source in _sources(node) if source in layers.layer_of
            ]
            read = storages_of(node.all_input_nodes)
            feeding += [changed_in[key] for key in read if key in changed_in]
            if feeding:
                changes = mutated_inputs(node, program)
                if changes and all(source.op == "get_attr" for source in changes):
                    feeding += [read_in.get(str(source.target), 0) for source in changes]
                elif changes or is_random(node):
                    feeding.append(len(layers) - 1)
                layers.layer_of[node] = max(feeding)
            else:
                waiting.append(node)
        for source in node.all_input_nodes:
            if source.op == "get_attr" and node in layers.layer_of:
                target = str(source.target)
                read_in[target] = max(read_in.get(target, 0), layers.layer_of[node])
        if node in layers.layer_of:
            changed_in.update(dict.fromkeys(changed_storages(node, program), layers.layer_of[node]))
    if not layers.names:
        layers.names.append(type(program.model).__name__)
        layers.paths.append("")
    _place_waiting(program, layers, nodes, waiting)
    _order_mutations(program, layers)
    return layers


def _place_waiting(
    program: Program, layers: Layers, nodes: list[fx.Node], waiting: list[fx.Node]
) -> None:
    """Let operations that only depend on the model's inputs join the first layer that reads them.

    A write in place joins the first layer that touches its memory afterwards, and a read of memory
    is never behind the next write to it.
    """
    unplaced = set(waiting)
    touched_later: dict[int, int] = {}
    changed_later: dict[int, int] = {}
    for node in reversed(nodes):
        read, changed = storages_of(node.all_input_nodes), changed_storages(node, program)
        if node in unplaced:
            reading = [layers.layer_of[user] for user in node.users if user in layers.layer_of]
            reading += [touched_later[key] for key in changed if key in touched_later]
            reading += [changed_later[key] for key in read if key in changed_later]
            layers.layer_of[node] = min(reading, default=0)
        layer = layers.layer_of[node]
        for keys, later in ((read, touched_later), (changed, changed_later)):
            later.update({key: min(layer, later.get(key, layer)) for key in keys})


def explain_opaque(program: Program, layers: Layers, index: int) -> str:
    """Return why a layer, or a module in it, is opaque; an empty string if it is traced."""
    reasons = {
        path_of(node): str(node.meta[OPAQUE])
        for node, layer in layers.layer_of.items()
        if layer == index and OPAQUE in node.meta
    }
    path = layers.paths[index]
    told = (reason if inner == path else f"{inner} {reason}" for inner, reason in reasons.items())
    return truncate("; ".join(told), MAX_NOTE)


def find_state(program: Program, layers: Layers, index: int) -> str:
    """Return the state in Python that a layer's calls as written change; empty if none."""
    called = [
        inner
        for node, layer in layers.layer_of.items()
        if layer == index
        for module in modules_called(node, program)
        for inner in module.modules()
    ]
    return next(
        (
            f"{path}.{name}".lstrip(".")
            for path, name in program.stateful.items()
            if find_module(program.model, path) in called
        ),
        "",
    )


def explain_kept_functions(program: Program, layers: Layers) -> dict[int, str]:
    """Return a clause on the custom autograd functions that a layer calls, by layer."""
    found: dict[int, dict[str, None]] = {}  # inner dicts keep the order
    for node, layer in layers.layer_of.items():
        if FUNCTION in node.meta:
            found.setdefault(layer, {})[str(node.meta[FUNCTION])] = None
    clause = "calls {} with its own derivative, kept as it is"
    return {layer: clause.format(", ".join(names)) for layer, names in found.items()}


def block_paths(model: nn.Module, nodes: list[fx.Node], opaque: Collection[str] = ()) -> set[str]:
    """Return the paths of the modules that become layers; an opaque module is not divided.

    An ``nn.Sequential`` model is divided into its direct children, as in torchgpipe.
    """
    if type(model) is nn.Sequential:
        return set(model._modules)
    modules = dict(model.named_modules(remove_duplicate=False))
    children = {
        path: [f"{path}.{name}" if path else name for name, _ in module.named_children()]
        for path, module in modules.items()
    }
    containers = {path for path, module in modules.items() if isinstance(module, CONTAINERS)}
    tree = ModuleTree(children, containers, opaque)
    return tree.choose_blocks([path_of(node) for node in nodes], _block_of)


def _block_of(path: str, blocks: set[str]) -> str | None:
    while True:
        if path in blocks:
            return path
        if not path:
            return None
        path = path.rpartition(".")[0]


def _call_of(node: fx.Node, block: str) -> str:
    """Return an identifier of the block's call to which a node belongs, if the tracer knows."""
    for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
        if path == block:
            return str(key)
    return str(node.meta.get(CALL, block)) if path_of(node) == block else block


def _sources(node: fx.Node) -> list[fx.Node]:
    return [source for source in node.all_input_nodes if source.op.startswith("call_")]


def _order_mutations(program: Program, layers: Layers) -> None:
    """Move nodes so that none is in an earlier layer than a value it reads."""
    for node in program.graph.nodes:
        if node in layers.layer_of:
            latest = max(
                (layers.layer_of[source] for source in _sources(node) if source in layers.layer_of),
                default=0,
            )
            layers.layer_of[node] = max(layers.layer_of[node], latest)


def find_readers(program: Program, layers: Layers) -> dict[int, set[int]]:
    """Return the layers that read each parameter or buffer, by the tensor's identity."""
    readers: dict[int, set[int]] = {}
    for node, layer in layers.layer_of.items():
        for module in modules_called(node, program):
            for tensor in (*module.parameters(), *module.buffers()):
                readers.setdefault(id(tensor), set()).add(layer)
        for name in references_of(node, program):
            readers.setdefault(id(program.attribute(name)), set()).add(layer)
        for source in node.all_input_nodes:
            if source.op == "get_attr":
                value = program.attribute(str(source.target))
                readers.setdefault(id(value), set()).add(layer)
    # A weight that the model returns is read where its outputs are made: the last stage holds it.
    for node in program.flat_outputs:
        if isinstance(node, fx.Node) and node.op == "get_attr":
            value = program.attribute(str(node.target))
            readers.setdefault(id(value), set()).add(len(layers.names) - 1)
    return readers
