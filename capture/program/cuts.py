"""Liveness between layers, and the legality of cuts.

A cut is legal if only tensors are live there and no later operation changes, in place, memory that
two of them share: each stage works on its own copy of what it receives.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor, fx
from torch.nn.parameter import is_lazy

from ...core.graph.graph import Boundary
from ...core.graph.tensors import DIFFERENTIABLE
from ...core.units import name_type
from ..sample import dtype_name, tensor_spec
from .layers import Layers, find_readers
from .mutation import changed_storages, mutated_inputs
from .program import Program, modules_called, references_of, storage_key, tensors_of, value_of


@dataclass(frozen=True)
class Cut:
    """Nodes live between layer ``after`` and the next, in graph order."""

    after: int
    nodes: tuple[fx.Node, ...]
    boundary: Boundary


def find_cuts(program: Program, layers: Layers) -> list[Cut]:
    """Find one cut per gap between consecutive layers, legal or not."""
    differentiable = differentiable_nodes(program)
    last_use = _last_use(program, layers)
    made_in = layers.layer_of | dict.fromkeys(program.inputs, -1)
    mutations = [
        (key, layer)
        for node, layer in layers.layer_of.items()
        for key in changed_storages(node, program)
    ]
    # A buffer that the forward updates must belong to a single stage: a cut inside the span of
    # layers that touch it would give two stages each their own copy.
    spans = _buffer_spans(program, layers)
    moving = _moving_memory(program, spans)
    barred = {f"buffer {name!r} is updated on both sides": span for name, span in spans.items()}
    barred |= _find_overlaps(program, layers)
    cuts = []
    for after in range(len(layers) - 1):
        nodes = tuple(
            node
            for node in program.graph.nodes
            if node in made_in and made_in[node] <= after < last_use.get(node, -1)
        )
        changed_later = {key for key, layer in mutations if layer > after}
        reason = _reason(nodes, changed_later, moving) or next(
            (why for why, (first, last) in barred.items() if first <= after < last), ""
        )
        tensors = tuple(
            tensor_spec(node.name, value_of(node), requires_grad=node in differentiable)
            for node in nodes
            if isinstance(value_of(node), Tensor)
        )
        boundary = Boundary(after=after, tensors=tensors, legal=not reason, reason=reason)
        cuts.append(Cut(after, nodes, boundary))
    return cuts


def _reason(nodes: tuple[fx.Node, ...], changed_later: set[int], moving: dict[int, str]) -> str:
    keys = []
    for node in nodes:
        value = value_of(node)
        if not isinstance(value, Tensor):
            return f"{node.name!r} is {name_type(value)}; only tensors can be sent"
        keys.append(storage_key(value))
    for node, key in zip(nodes, keys, strict=True):
        if key in moving:
            return (
                f"{node.name!r} is memory of buffer {moving[key]!r}, which the next micro-batch "
                "changes before it is read"
            )
        if key in changed_later and keys.count(key) > 1:
            return f"{node.name!r} shares memory with another value and is changed in place later"
    return ""


def _last_use(program: Program, layers: Layers) -> dict[fx.Node, int]:
    """Return the last layer that reads each node; the model's outputs count as the last layer."""
    end = {program.output_node: len(layers) - 1}
    return {
        node: max((layers.layer_of.get(user, end.get(user, -1)) for user in node.users), default=-1)
        for node in program.graph.nodes
    }


def _buffer_spans(program: Program, layers: Layers) -> dict[str, tuple[int, int]]:
    """Return the first and last layer that touches each buffer that the forward changes."""
    names = {
        storage_key(buffer): name
        for name, buffer in reversed(list(program.model.named_buffers(remove_duplicate=False)))
    }
    touched: dict[int | None, set[int]] = {}
    changed: set[int | None] = set()
    for node, layer in layers.layer_of.items():
        for module in modules_called(node, program):
            for buffer in module.buffers():
                touched.setdefault(storage_key(buffer), set()).add(layer)
                # A module may update any of its buffers (batch statistics, counters).
                changed.add(storage_key(buffer))
        for name, is_changed in references_of(node, program).items():
            reached = storage_key(program.attribute(name))
            touched.setdefault(reached, set()).add(layer)
            if is_changed:
                changed.add(reached)
        for source in node.all_input_nodes:
            touched.setdefault(_attribute_key(source, program), set()).add(layer)
        changed.update(_attribute_key(source, program) for source in mutated_inputs(node, program))
    return {names[key]: (min(touched[key]), max(touched[key])) for key in changed if key in names}


def _find_overlaps(program: Program, layers: Layers) -> dict[str, tuple[int, int]]:
    """Return the layers between which tensors over one memory are read, by what is wrong there.

    The optimizer changes both at once where they are; two stages would each have memory of its own.
    """
    model, readers = program.model, find_readers(program, layers)
    held: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        held.setdefault(id(tensor), (name, tensor))
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in held.values():
        if tensor.layout is torch.strided and not is_lazy(tensor):
            by_storage.setdefault(storage_key(tensor), []).append((name, tensor))
    found = {}
    for sharing in by_storage.values():
        for (name, tensor), (other, twin) in combinations(sharing, 2):
            read = readers.get(id(tensor), set()) | readers.get(id(twin), set())
            if (tensor.requires_grad or twin.requires_grad) and read and _overlap(tensor, twin):
                why = (
                    f"{name!r} and {other!r} are different tensors over one memory; assign one of "
                    "them to both places (decoder.weight = encoder.weight) to cut between them"
                )
                found[why] = (min(read), max(read))
    return found


def _overlap(tensor: Tensor, other: Tensor) -> bool:
    """Return True if two tensors of one storage have elements in the same range of it."""
    (first, last), (begin, end) = map(_extent, (tensor, other))
    return first < end and begin < last


def _extent(tensor: Tensor) -> tuple[int, int]:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum(int(size - 1) * int(stride) for size, stride in steps) if tensor.numel() else 0
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + span * tensor.element_size()


def _moving_memory(program: Program, changed: Iterable[str]) -> dict[int, str]:
    """Return the storages of changed buffers, as keys of the nodes' fake values."""
    # The graph's values are fake tensors, whose storages differ from those of the real buffers.
    by_storage: dict[int | None, str] = {
        storage_key(program.attribute(name)): name for name in changed
    }
    found = {}
    for node in program.graph.nodes:
        if node.op == "get_attr" and isinstance(value_of(node), Tensor):
            key = _attribute_key(node, program)
            if key in by_storage:
                found[storage_key(value_of(node))] = by_storage[key]
    return found


def _attribute_key(node: fx.Node, program: Program) -> int | None:
    """Return the key of the storage of a tensor that a node names; `None` for other nodes."""
    value = program.attribute(str(node.target)) if node.op == "get_attr" else None
    return storage_key(value) if isinstance(value, Tensor) else None


def differentiable_nodes(program: Program) -> set[fx.Node]:
    """Return the nodes through which a gradient flows to a trainable parameter."""
    trainable = {
        name
        for name, parameter in program.model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    }
    found: set[fx.Node] = set()
    for node in program.graph.nodes:
        value = value_of(node)
        if node.op == "get_attr":
            flows = str(node.target) in trainable
        elif called := modules_called(node, program):
            own = any(p.requires_grad for module in called for p in module.parameters())
            own = own or not trainable.isdisjoint(references_of(node, program))
            flows = own or any(source in found for source in node.all_input_nodes)
        elif node.op in ("call_function", "call_method"):
            flows = not _stops_gradient(node) and any(
                source in found for source in node.all_input_nodes
            )
        else:
            flows = False
        tensors = list(tensors_of(value))
        if node.op != "get_attr" and tensors:
            flows = flows and any(dtype_name(tensor.dtype) in DIFFERENTIABLE for tensor in tensors)
        if flows:
            found.add(node)
            found |= _sharing_memory(node, program)
    return found


def _sharing_memory(node: fx.Node, program: Program) -> set[fx.Node]:
    """Return the nodes that share memory with what a node changes in place."""
    # Writing a differentiable value into memory makes every view of it differentiable.
    keys = changed_storages(node, program)
    if not keys:
        return set()
    return {
        other
        for other in program.graph.nodes
        if other.op.startswith("call_")
        and any(
            storage_key(tensor) in keys and dtype_name(tensor.dtype) in DIFFERENTIABLE
            for tensor in tensors_of(value_of(other))
        )
    }


def _stops_gradient(node: fx.Node) -> bool:
    name = str(getattr(node.target, "__name__", node.target))
    if name == "wrap_with_set_grad_enabled":
        return not node.args[0]
    return name.split(".")[0] in ("detach", "detach_")
