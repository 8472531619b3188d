"""A traced model: an FX graph over the model's own modules and parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from torch import Tensor, fx, nn
from torch._C import _functorch as functorch

from ...core.graph.graph import CaptureMode
from ..sample import CallStructure

PATH = "stagewright_path"
"""Key of ``node.meta`` for the fully qualified name of the module a node belongs to."""

CALL = "stagewright_call"
"""Key of ``node.meta`` that tells two calls of the same module apart."""

VALUE = "val"
"""Key of ``node.meta`` for the fake tensor a node produces (torch's own key)."""

OPAQUE = "stagewright_opaque"
"""Key of ``node.meta`` for the reason why a call is opaque."""

WHOLE = "stagewright_whole"
"""Key of ``node.meta`` that marks the single call of an opaque model."""

FUNCTION = "stagewright_function"
"""Key of ``node.meta`` for the name of the custom autograd function that is called."""

WRITTEN = "stagewright_written"
"""Key of ``node.meta`` for the tensor arguments that an opaque call was seen to change in place."""


@dataclass
class Program:
    """A flat graph: placeholders are tensors, the output is a flat list.

    Attributes:
        holder: Holds names that the model does not have, such as lifted constants.
        graph: The nodes, each with its module path, call and fake value in ``meta``.
        structure: Names of the inputs, in order, as are the placeholders in ``inputs``.
        out_spec: Pytree spec that rebuilds the model's output from the flat list.
        output: Used instead, if given: the output with a `TensorPosition` for every tensor.
        fixed_mode: Operations whose training or evaluation behaviour is frozen in the graph.
        frozen_in: Modules of those operations.
        frozen_modules: Modules in evaluation mode while the model was captured in training mode.
        opaque: Paths of the opaque modules, with the reasons.
        stateful: Names of the state in Python that modules change in every call, by their paths.
        changed: Attributes that the model's forward changes, by path and name.
        attributes_read: Names of attributes that forward read; `None` if that is not known.
        references: See `ForwardObservation.references`.
        chain_break: See `Graph.chain_break`.
        losses: See `ForwardObservation.losses`.
        sample_ranges: Least and largest value of every integer or boolean input, in order.
    """

    model: nn.Module
    holder: nn.Module
    graph: fx.Graph
    mode: CaptureMode
    structure: CallStructure
    inputs: list[fx.Node]
    out_spec: Any
    training: bool
    output: Any = None
    fixed_mode: tuple[str, ...] = ()
    frozen_in: tuple[str, ...] = ()
    frozen_modules: frozenset[nn.Module] = frozenset()
    opaque: dict[str, str] = field(default_factory=dict)
    stateful: Mapping[str, str] = field(default_factory=dict)
    changed: Collection[tuple[str, str]] = ()
    attributes_read: Collection[str] | None = None
    references: Mapping[nn.Module, Mapping[str, bool]] = field(default_factory=dict)
    chain_break: str | None = None
    losses: tuple[str, ...] = ()
    sample_ranges: tuple[tuple[int, int] | None, ...] = ()
    notes: list[str] = field(default_factory=list)

    @property
    def output_node(self) -> fx.Node:
        last: fx.Node = next(node for node in reversed(self.graph.nodes) if node.op == "output")
        return last

    @property
    def flat_outputs(self) -> list[Any]:
        """Return a node or a constant for each leaf of the output."""
        return list(self.output_node.args[0])  # type: ignore[arg-type]

    def attribute(self, target: str) -> Any:
        """Return the module, parameter, buffer or constant of a name."""
        return resolve_in((self.model, self.holder), target)


def modules_called(node: fx.Node, program: Program) -> list[nn.Module]:
    """Return the modules that a node runs: the one it calls, or those passed to a checkpoint."""
    if node.op == "call_module":
        return [program.attribute(str(node.target))]
    if WHOLE in node.meta:
        return [program.model]
    if OPAQUE not in node.meta:
        return []
    given = [program.attribute(str(n.target)) for n in node.all_input_nodes if n.op == "get_attr"]
    return [value for value in given if isinstance(value, nn.Module)]


def references_of(node: fx.Node, program: Program) -> dict[str, bool]:
    """Return the tensors that a node's modules reach without holding them, and whether changed."""
    return {
        name: changed
        for module in modules_called(node, program)
        for name, changed in program.references.get(module, {}).items()
    }


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name; tied ones under each of their names."""
    parameters = module.named_parameters(remove_duplicate=False)
    return {**dict(parameters), **dict(module.named_buffers(remove_duplicate=False))}


def find_module(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def is_inside(path: str, module: str) -> bool:
    """Return True if a path is that of the module or of something below it."""
    return path == module or not module or path.startswith(f"{module}.")


def resolve_in(roots: Iterable[nn.Module], target: str) -> Any:
    """Resolve a name on the first of several modules that has it."""
    for root in roots:
        try:
            return attrgetter(target)(root)
        except AttributeError:
            continue
    raise AttributeError(target)


def path_of(node: fx.Node) -> str:
    """Return the path of the module in which a node was traced; empty for the root."""
    return str(node.meta.get(PATH, ""))


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a node's value: itself, or the elements of a tuple."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_of(item)


def value_of(node: fx.Node) -> Any:
    return node.meta.get(VALUE)


def storages_of(nodes: Iterable[fx.Node]) -> set[int]:
    """Return the keys of the storages of nodes' values."""
    return {storage_key(tensor) for node in nodes for tensor in tensors_of(value_of(node))}


def storage_key(tensor: Tensor) -> int:
    """Return a key that is equal for all views of one storage."""
    while functorch.is_functorch_wrapped_tensor(tensor):  # inside torch.func.grad or vmap
        tensor = functorch.get_unwrapped(tensor)
    # Not data_ptr: it is 0 for fake and meta tensors.
    return int(tensor.untyped_storage()._cdata)
