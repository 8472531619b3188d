"""Conversion of an exported program to a `Graph`: operations in layers, and the cuts between."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from pydantic import ValidationError

from ...core.document import to_invalid_input
from ...core.errors import InvalidInput
from ...core.graph.allowed_ops import GETITEM
from ...core.graph.arguments import Argument, Element, InputReference, NodeReference, StateReference
from ...core.graph.graph import MODEL_INPUT, Boundary, Edge, Graph, Layer, Operation, Parameter
from ...core.graph.tensors import (
    DIFFERENTIABLE,
    RANDN_DTYPES,
    ConstantFill,
    Sample,
    SampleTensor,
    StateTensor,
    TensorSpec,
)
from .archive import read_program_json
from .layers import assign_exported_layers
from .program import (
    CONTRADICTIONS,
    ExportedProgram,
    ExportedState,
    ExportedTensor,
    OperatorCall,
    TensorUse,
    contradiction,
    parse_program,
)

NOTE = "read from an exported program: buffers are made up, integer inputs are 0 or 1"

RANDOM = frozenset(
    (
        "bernoulli", "bernoulli_", "dropout", "dropout_", "feature_dropout", "normal_", "rand",
        "rand_like", "randint", "randn", "randn_like", "uniform_",
    )
)  # fmt: skip
RUNNING_STATISTICS = {"batch_norm": slice(3, 5), "instance_norm": slice(3, 5)}
"""Arguments that are updated in place although no operator schema says so."""

MAX_NAME_CHARACTERS = 200
MAX_PATH_LENGTH = 16


def read_pt2(archive: bytes) -> Graph:
    """Return the graph of an archive written by ``torch.export.save``.

    Raises:
        InvalidInput: This is no such archive, or its program contains what a graph cannot hold.
    """
    program = parse_program(read_program_json(archive))
    try:
        return _GraphBuilder(program).build()
    except InvalidInput:
        raise
    except ValidationError as error:
        raise to_invalid_input(error, "exported program") from None
    except CONTRADICTIONS as error:  # such as a result that its tensors do not describe
        raise contradiction(error) from None


@dataclass
class _Node:
    """One operation of the graph: an operator call, or the extraction of one of its results.

    Attributes:
        results: Names of the tensors it returns.
        sources: Earlier operations it reads, by position.
        is_constant: Whether it depends on no input, parameter or buffer and is not random.
    """

    call: OperatorCall
    name: str
    results: tuple[str, ...]
    target: str
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    sources: tuple[int, ...] = ()
    is_constant: bool = False
    layer: int = 0

    def __post_init__(self) -> None:
        self.operator = self.target.split(".")[1] if "." in self.target else self.target
        self.reads = tuple(dict.fromkeys(_used((*self.arguments, *self.keywords.values()))))
        self.writes: tuple[str, ...] = ()  # tensors changed in place
        if self.operator in RUNNING_STATISTICS:
            updated = self.arguments[RUNNING_STATISTICS[self.operator]]
            self.writes = tuple(item.name for item in updated if isinstance(item, TensorUse))
        # aten's convention: add_ works in place, __and__ does not; detach_ changes no value.
        elif self.operator.endswith("_") and not self.operator.endswith(("__", "detach_")):
            self.writes = tuple(_used(self.arguments[:1]))

    @property
    def stays(self) -> bool:
        """Return True if the operation must stay where it happens."""
        return bool(self.writes) or self.operator in RANDOM


def _used(given: Any) -> Iterator[str]:
    """Yield the names of the tensors among arguments, down to nested lists."""
    if isinstance(given, TensorUse):
        yield given.name
    elif isinstance(given, tuple):
        for item in given:
            yield from _used(item)


def _nodes_of(call: OperatorCall) -> Iterator[_Node]:
    """Yield the call and, if it returns several tensors, one `getitem` for each."""
    made = tuple(name for name in call.results if name is not None)
    has_one = not call.is_list and len(call.results) == 1
    name = made[0] if has_one else f"{made[0] if made else call.target.replace('.', '_')}_all"
    yield _Node(call, name, made, call.target, call.arguments, call.keywords)
    if not has_one:
        for position, result in enumerate(call.results):
            if result is not None:
                yield _Node(call, result, (result,), GETITEM, (TensorUse(name), position))


class _GraphBuilder:
    def __init__(self, program: ExportedProgram) -> None:
        self._program = program
        self._state = {entry.tensor.name: entry for entry in program.state}
        self._inputs = {tensor.name: tensor for tensor in program.inputs}
        self._nodes = [node for call in program.calls for node in _nodes_of(call)]
        self._position = {node.name: index for index, node in enumerate(self._nodes)}
        kinds = (call.kinds[0] for call in program.calls if call.kinds)
        self._model = next(kinds, "Exported")[:MAX_NAME_CHARACTERS]
        self._find_sources()
        nodes = self._nodes
        self._layers = assign_exported_layers(
            [node.call for node in nodes],
            [node.sources for node in nodes],
            [node.stays for node in nodes],
            [node.is_constant for node in nodes],
            program.modules,
            self._model,
        )
        self._readers: dict[str, set[int]] = defaultdict(set)
        self._receivers: dict[str, set[int]] = defaultdict(set)  # without readers for constants
        for node, layer in zip(nodes, self._layers.layer_of, strict=True):
            node.layer = layer
            for name in node.reads:
                self._readers[name].add(layer)
                if not node.is_constant:
                    self._receivers[name].add(layer)
        self._differentiable = self._find_differentiable()
        # Constants are not sent between stages: every layer that reads one computes it again.
        self._made_in = dict.fromkeys(self._inputs, MODEL_INPUT) | {
            node.name: node.layer for node in nodes if not node.is_constant
        }

    def build(self) -> Graph:
        program = self._program
        parameters = self._parameters()
        kinds = enumerate(zip(self._layers.names, self._layers.kinds, strict=True))
        used: dict[int, list[Parameter]] = defaultdict(list)
        for parameter in parameters:
            for index in parameter.layers:
                used[index].append(parameter)
        return Graph(
            model=self._model,
            mode="export",
            inputs=tuple(map(_spec, program.inputs)),
            outputs=tuple(_spec(program.tensors[name]) for name in self._returned()),
            layers=tuple(_layer(name, kind, used[index]) for index, (name, kind) in kinds),
            edges=tuple(self._edges()),
            boundaries=tuple(self._boundaries()),
            parameters=parameters,
            operations=tuple(map(self._operation, self._nodes)),
            notes=(NOTE,),
            rebuildable=True,
            state=tuple(map(_state_tensor, program.state)),
            returns=tuple(map(self._argument, program.outputs)),
            output_paths=_output_paths(program.result_tree, len(program.outputs)),
            input_structure=_input_structure(program),
            sample=Sample(inputs={tensor.name: _sample(tensor) for tensor in program.inputs}),
        )

    def _find_sources(self) -> None:
        """Note what every operation reads, and mark constants."""
        constants = {name for name, entry in self._state.items() if entry.kind == "constant"}
        for index, node in enumerate(self._nodes):
            positions = (self._position.get(name, index) for name in node.reads)
            node.sources = tuple(position for position in positions if position < index)
            node.is_constant = (
                all(name in self._position or name in constants for name in node.reads)
                and not node.stays
                and all(self._nodes[source].is_constant for source in node.sources)
            )

    def _find_differentiable(self) -> set[str]:
        """Return the operations and state through which a gradient flows to a parameter."""
        found = {
            name
            for name, entry in self._state.items()
            if entry.kind == "parameter" and entry.tensor.requires_grad
        }
        tensors = self._program.tensors
        for node in self._nodes:
            if (
                node.operator not in ("detach", "detach_")
                and not found.isdisjoint(node.reads)
                and any(tensors[name].dtype in DIFFERENTIABLE for name in node.results)
            ):
                found.add(node.name)
        return found

    def _returned(self) -> list[str]:
        return [use.name for use in self._program.outputs if isinstance(use, TensorUse)]

    def _parameters(self) -> tuple[Parameter, ...]:
        return tuple(
            Parameter(
                names=(entry.name,),
                size_bytes=_spec(entry.tensor).size_bytes,
                numel=prod(entry.tensor.shape),
                layers=tuple(sorted(self._readers[entry.tensor.name])),
                kind=entry.kind,
                trainable=entry.kind == "parameter" and entry.tensor.requires_grad,
            )
            for entry in self._program.state
            if entry.kind != "constant"
        )

    def _boundaries(self) -> Iterator[Boundary]:
        # Results count as read by the last layer.
        last = {name: max(layers) for name, layers in self._receivers.items()}
        last |= dict.fromkeys(self._returned(), len(self._layers.names) - 1)
        # Layers between the first and the last that touch an updated buffer cannot be separated.
        written = (name for node in self._nodes for name in node.writes)
        updated = dict.fromkeys(name for name in written if name in self._state)
        count = len(self._layers.names) - 1
        crossing = _spans(
            ((name, made, last.get(name, -1)) for name, made in self._made_in.items()), count
        )
        shared = _spans(
            ((name, min(self._readers[name]), max(self._readers[name])) for name in updated), count
        )
        for after, (live, kept) in enumerate(zip(crossing, shared, strict=True)):
            lists = [name for name in live if len(self._results(name)) != 1]
            torn = [self._state[name].name for name in kept]
            reason = f"buffer {torn[0]!r} is updated on both sides" if torn else ""
            if lists:
                reason = f"{lists[0]!r} is a list, and only tensors can be sent"
            yield Boundary(
                after=after,
                tensors=tuple(self._sent(name) for name in live if name not in lists),
                legal=not reason,
                reason=reason,
            )

    def _edges(self) -> Iterator[Edge]:
        for name, source in self._made_in.items():
            if len(self._results(name)) == 1:
                for target in sorted(self._receivers.get(name, ())):
                    if target > source:
                        yield Edge(source=source, target=target, tensor=self._sent(name))

    def _results(self, name: str) -> tuple[str, ...]:
        return (name,) if name in self._inputs else self._nodes[self._position[name]].results

    def _sent(self, name: str) -> TensorSpec:
        tensor = self._inputs.get(name) or self._program.tensors[self._results(name)[0]]
        return _spec(tensor, name, requires_grad=name in self._differentiable)

    def _operation(self, node: _Node) -> Operation:
        return Operation(
            name=node.name,
            target=node.target,
            kind="function",
            inputs=tuple(name for name in node.reads if name not in self._state),
            outputs=tuple(_spec(self._program.tensors[name], node.name) for name in node.results),
            layer=node.layer,
            arguments=tuple(map(self._argument, node.arguments)),
            keywords={name: self._argument(given) for name, given in node.keywords.items()},
        )

    def _argument(self, given: Any) -> Argument:
        return (
            tuple(map(self._element, given)) if isinstance(given, tuple) else self._element(given)
        )

    def _element(self, given: Any) -> Element:
        if not isinstance(given, TensorUse):
            return given  # type: ignore[no-any-return]  # a literal, checked when it was read
        if given.name in self._state:
            return StateReference(state=_state_name(self._state[given.name]))
        if given.name in self._inputs:
            return InputReference(input=given.name)
        return NodeReference(node=given.name)


def _spans(entries: Iterable[tuple[str, int, int]], count: int) -> Iterator[list[str]]:
    """Yield the names with ``first <= after < last`` for each of the first ``count`` gaps.

    The entries are name, first and last; their order is kept. O(names + what is yielded).
    """
    starting: dict[int, list[tuple[int, str, int]]] = defaultdict(list)
    for position, (name, first, last) in enumerate(entries):
        starting[max(first, 0)].append((position, name, last))
    live: list[tuple[int, str, int]] = []
    for after in range(count):
        live = sorted(entry for entry in (*live, *starting[after]) if after < entry[2])
        yield [name for _, name, _ in live]


def _spec(
    tensor: ExportedTensor, name: str | None = None, *, requires_grad: bool = False
) -> TensorSpec:
    return TensorSpec(
        name=name or tensor.name,
        shape=tensor.shape,
        dtype=tensor.dtype,
        requires_grad=requires_grad,
    )


def _state_name(entry: ExportedState) -> str:
    # A constant's own name need not be valid as a module attribute; the program's name is.
    return entry.tensor.name if entry.kind == "constant" else entry.name


def _state_tensor(entry: ExportedState) -> StateTensor:
    tensor = entry.tensor
    contiguous, length = [], 1
    for size in reversed(tensor.shape):
        contiguous.append(length)
        length *= max(size, 1)
    is_contiguous = tensor.strides == tuple(reversed(contiguous)) or 0 in tensor.shape
    # Buffers are made up: ones where they may be variances, zeros where they may be positions.
    fill = ConstantFill(value=1.0 if tensor.dtype in RANDN_DTYPES else 0)
    return StateTensor(
        names=(_state_name(entry),),
        shape=tensor.shape,
        dtype=tensor.dtype,
        kind=entry.kind,
        requires_grad=entry.kind == "parameter" and tensor.requires_grad,
        strides=None if is_contiguous else tensor.strides,
        persistent=entry.persistent,
        fill=None if entry.kind == "parameter" else fill,
    )


def _layer(name: str, kind: str, used: list[Parameter]) -> Layer:
    return Layer(
        name=name,
        module_type=kind[:MAX_NAME_CHARACTERS],
        module_fqns=tuple(sorted({entry.names[0].rpartition(".")[0] for entry in used})),
        parameter_bytes=sum(entry.size_bytes for entry in used if entry.kind == "parameter"),
    )


def _sample(tensor: ExportedTensor) -> SampleTensor:
    if tensor.dtype in RANDN_DTYPES:
        return SampleTensor(shape=tensor.shape, dtype=tensor.dtype)
    return SampleTensor(shape=tensor.shape, dtype=tensor.dtype, fill="randint", low=0, high=2)


def _input_structure(program: ExportedProgram) -> str:
    names = [tensor.name for tensor in program.inputs]
    first_keyword = len(names) - program.keyword_inputs
    return json.dumps({"positional": names[:first_keyword], "keyword": names[first_keyword:]})


def _output_paths(tree: Mapping[str, Any], count: int) -> tuple[tuple[str | int, ...], ...]:
    """Return where each output sits in the result; numbers where the tree does not fit."""
    found: list[tuple[str | int, ...]] = []
    waiting: list[tuple[Any, tuple[str | int, ...]]] = [(tree, ())]
    while waiting and len(found) <= count:
        here, path = waiting.pop()
        children = here.get("children_spec", []) if isinstance(here, dict) else []
        if not children:
            found.append(path)
            continue
        keys = _child_keys(here, len(children))
        # Reversed, because the last one added is visited first.
        waiting += [(child, (*path, key)) for key, child in zip(keys, children, strict=True)][::-1]
    is_usable = len(found) == len(set(found)) == count
    if is_usable and all(len(path) <= MAX_PATH_LENGTH for path in found):
        return tuple(found)
    return tuple((index,) for index in range(count))


def _child_keys(node: Mapping[str, Any], count: int) -> list[str | int]:
    if node.get("type") == "builtins.dict" and isinstance(node.get("context"), str):
        try:
            keys = json.loads(node["context"])
        except ValueError:
            keys = []
        if isinstance(keys, list) and len(keys) == count:
            return [key if isinstance(key, int) else str(key)[:MAX_NAME_CHARACTERS] for key in keys]
    return list(range(count))
