"""An exported program as a `Graph`: its operations in layers, and what crosses between them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from itertools import chain
from math import prod
from typing import Any

from pydantic import ValidationError

from ...core.document import invalid_input
from ...core.graph.allowed_ops import GETITEM
from ...core.graph.arguments import Argument, Element, InputReference, NodeReference, StateReference
from ...core.graph.graph import MODEL_INPUT, Boundary, Edge, Graph, Layer, Operation, Parameter
from ...core.graph.sample import Sample, SampleTensor
from ...core.graph.state_tensors import ConstantFill, StateTensor
from ...core.graph.tensors import DIFFERENTIABLE, TensorSpec
from .pt2_archive import program_json
from .pt2_layers import Blocks, blocks_of
from .pt2_program import Call, Exported, Named, State, Value, read_exported

NOTE = "read from an exported program: buffers are made up, integer inputs are 0 or 1"

RANDOM = frozenset(
    (
        "bernoulli", "bernoulli_", "dropout", "dropout_", "feature_dropout", "normal_", "rand",
        "rand_like", "randint", "randn", "randn_like", "uniform_",
    )
)  # fmt: skip
UPDATED = {"batch_norm": (3, 4), "instance_norm": (3, 4)}
"""Positions of running statistics, which are changed though no schema says so."""


def read_pt2(archive: bytes) -> Graph:
    """The graph of an archive written by ``torch.export.save``; see `archive` for what is read.

    Raises:
        InvalidInput: It is no such archive, or its program has what a graph cannot hold.
    """
    return read_program(program_json(archive))


def read_program(text: bytes) -> Graph:
    """The graph of a program's JSON.

    Raises:
        InvalidInput: It has what a graph cannot hold.
    """
    return graph_of(read_exported(text))


def graph_of(program: Exported) -> Graph:
    """The graph of a program.

    Raises:
        InvalidInput: Its names, sizes or references do not fit together.
    """
    try:
        return _Writer(program).graph()
    except ValidationError as error:
        raise invalid_input(error, "exported program") from None


class _Writer:
    def __init__(self, program: Exported) -> None:
        self._program = program
        self._state = {entry.value.name: entry for entry in program.state}
        self._inputs = {value.name: value for value in program.inputs}
        self._steps = list(chain.from_iterable(map(_steps, program.calls)))
        self._maker = {step.name: index for index, step in enumerate(self._steps)}
        self._reads = [step.reads() for step in self._steps]
        self._sources = [
            [self._maker[name] for name in read if self._maker.get(name, index) < index]
            for index, read in enumerate(self._reads)
        ]
        self._model = next((call.kinds[0] for call in program.calls if call.kinds), "Exported")
        self._constant = self._constants()
        self._blocks = self._layers()
        self._differentiable = self._with_gradients()

    def graph(self) -> Graph:
        program, blocks = self._program, self._blocks
        inputs = tuple(_spec(value) for value in program.inputs)
        parameters = self._parameters()
        return Graph(
            model=self._model[:200],
            mode="export",
            inputs=inputs,
            outputs=tuple(
                _spec(program.values[given.name])
                for given in program.outputs
                if isinstance(given, Named)
            ),
            layers=tuple(
                _layer(name, kind, index, parameters)
                for index, (name, kind) in enumerate(zip(blocks.names, blocks.kinds, strict=True))
            ),
            edges=tuple(self._edges()),
            boundaries=tuple(self._boundary(after) for after in range(len(blocks.names) - 1)),
            parameters=parameters,
            operations=tuple(
                self._operation(step, layer)
                for step, layer in zip(self._steps, blocks.layer_of, strict=True)
            ),
            notes=(NOTE,),
            rebuildable=True,
            state=tuple(_state(entry) for entry in program.state),
            returns=tuple(self._argument(given) for given in program.outputs),
            output_paths=_paths(program.result_tree, len(program.outputs)),
            input_structure=_structure(program),
            sample=Sample(inputs={value.name: _sample(value) for value in program.inputs}),
        )

    def _constants(self) -> list[bool]:
        """Operations that depend on no input, no parameter and no buffer, and are not random."""
        found: list[bool] = []
        for step, read, sources in zip(self._steps, self._reads, self._sources, strict=True):
            lifted = all(
                name in self._maker
                or (name in self._state and self._state[name].kind == "constant")
                for name in read
            )
            plain = lifted and not step.writes and step.operator not in RANDOM
            found.append(plain and all(found[source] for source in sources))
        return found

    def _layers(self) -> Blocks:
        return blocks_of(
            [step.call for step in self._steps],
            self._sources,
            [bool(step.writes) or step.operator in RANDOM for step in self._steps],
            self._constant,
            self._program.modules,
            self._model[:200],
        )

    def _with_gradients(self) -> set[str]:
        """Names of operations and state through which a gradient flows to a parameter."""
        found = {
            name
            for name, entry in self._state.items()
            if entry.kind == "parameter" and entry.value.requires_grad
        }
        for step, read in zip(self._steps, self._reads, strict=True):
            values = [self._program.values[name] for name in step.results]
            if (
                step.operator not in ("detach", "detach_")
                and any(name in found for name in read)
                and any(value.dtype in DIFFERENTIABLE for value in values)
            ):
                found.add(step.name)
        return found

    def _parameters(self) -> tuple[Parameter, ...]:
        readers = self._state_readers()
        return tuple(
            Parameter(
                names=(entry.name,),
                size_bytes=_spec(entry.value).size_bytes,
                numel=prod(entry.value.shape),
                layers=tuple(sorted(readers[entry.value.name])),
                kind=entry.kind,
                trainable=entry.kind == "parameter" and entry.value.requires_grad,
            )
            for entry in self._program.state
            if entry.kind != "constant"
        )

    def _state_readers(self) -> dict[str, set[int]]:
        readers: dict[str, set[int]] = defaultdict(set)
        for read, layer in zip(self._reads, self._blocks.layer_of, strict=True):
            for name in read:
                readers[name].add(layer)
        return readers

    def _last_use(self) -> dict[str, int]:
        """The last layer that reads each value; outputs are read after the last one."""
        last: dict[str, int] = defaultdict(lambda: -1)
        for read, layer, plain in zip(
            self._reads, self._blocks.layer_of, self._constant, strict=True
        ):
            for name in read:
                last[name] = max(last[name], -1 if plain else layer)
        for given in self._program.outputs:
            if isinstance(given, Named):
                last[given.name] = len(self._blocks.names) - 1
        return last

    def _made(self) -> dict[str, int]:
        """The layer that makes each value that is sent and not made again."""
        made = dict.fromkeys(self._inputs, MODEL_INPUT)
        for step, layer, plain in zip(
            self._steps, self._blocks.layer_of, self._constant, strict=True
        ):
            if not plain:
                made[step.name] = layer
        return made

    def _boundary(self, after: int) -> Boundary:
        if not hasattr(self, "_uses"):
            self._uses, self._makers, self._spans = self._last_use(), self._made(), self._moved()
        live = [name for name, made in self._makers.items() if made <= after < self._uses[name]]
        torn = [name for name, (first, last) in self._spans.items() if first <= after < last]
        lists = [name for name in live if len(self._results(name)) != 1]
        reason = f"buffer {torn[0]!r} is updated on both sides" if torn else ""
        if lists:
            reason = f"{lists[0]!r} is a list, and only tensors can be sent"
        return Boundary(
            after=after,
            tensors=tuple(self._sent(name) for name in live if name not in lists),
            legal=not reason,
            reason=reason,
        )

    def _moved(self) -> dict[str, tuple[int, int]]:
        """First and last layer that touches each buffer that is changed."""
        written = {name for step in self._steps for name in step.writes if name in self._state}
        readers = self._state_readers()
        return {
            self._state[name].name: (min(readers[name]), max(readers[name])) for name in written
        }

    def _results(self, name: str) -> tuple[str, ...]:
        return (name,) if name in self._inputs else self._steps[self._maker[name]].results

    def _sent(self, name: str) -> TensorSpec:
        value = self._inputs.get(name) or self._program.values[self._results(name)[0]]
        return _spec(value, name=name, requires_grad=name in self._differentiable)

    def _edges(self) -> list[Edge]:
        targets: dict[str, set[int]] = defaultdict(set)
        for read, layer, plain in zip(
            self._reads, self._blocks.layer_of, self._constant, strict=True
        ):
            for name in read if not plain else ():
                targets[name].add(layer)
        return [
            Edge(source=source, target=target, tensor=self._sent(name))
            for name, source in self._made().items()
            if len(self._results(name)) == 1
            for target in sorted(targets[name])
            if target > source
        ]

    def _operation(self, step: _Step, layer: int) -> Operation:
        return Operation(
            name=step.name,
            target=step.target,
            kind="function",
            inputs=tuple(name for name in step.reads() if name not in self._state),
            outputs=tuple(
                _spec(self._program.values[name], name=step.name) for name in step.results
            ),
            layer=layer,
            arguments=tuple(self._argument(given) for given in step.arguments),
            keywords={name: self._argument(given) for name, given in step.keywords.items()},
        )

    def _argument(self, given: Any) -> Argument:
        if isinstance(given, tuple):
            return tuple(self._element(item) for item in given)
        return self._element(given)

    def _element(self, given: Any) -> Element:
        if not isinstance(given, Named):
            return given  # type: ignore[no-any-return]  # a literal, checked when it was read
        if given.name in self._state:
            return StateReference(state=_own_name(self._state[given.name]))
        if given.name in self._inputs:
            return InputReference(input=given.name)
        return NodeReference(node=given.name)


class _Step:
    """One operation of a graph: a call, or the taking apart of what a call returns."""

    def __init__(
        self,
        call: Call,
        name: str,
        results: tuple[str, ...],
        target: str,
        arguments: tuple[Any, ...],
        keywords: Mapping[str, Any] | None = None,
    ) -> None:
        self.call, self.name, self.results = call, name, results
        self.target, self.arguments, self.keywords = target, arguments, keywords or {}
        self.operator = target.split(".")[1] if "." in target else target

    @property
    def writes(self) -> tuple[str, ...]:
        """Names of what it changes in place."""
        if self.operator in UPDATED:
            given = self.arguments[UPDATED[self.operator][0] :][:2]
            return tuple(item.name for item in given if isinstance(item, Named))
        named = self.operator.endswith("_") and not self.operator.endswith("__")
        changes = named and self.operator != "detach_"
        return tuple(_names(self.arguments[:1])) if changes else ()

    def reads(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(_names((*self.arguments, *self.keywords.values()))))


def _names(given: Any) -> list[str]:
    if isinstance(given, Named):
        return [given.name]
    return [name for item in given for name in _names(item)] if isinstance(given, tuple) else []


def _steps(call: Call) -> list[_Step]:
    """The call, and one `getitem` for every tensor of several."""
    made = tuple(name for name in call.results if name is not None)
    if not call.is_list and len(call.results) == 1:
        return [_Step(call, made[0], made, call.target, call.arguments, call.keywords)]
    name = f"{made[0] if made else call.target.replace('.', '_')}_all"
    whole = _Step(call, name, made, call.target, call.arguments, call.keywords)
    taken = [
        _Step(call, result, (result,), GETITEM, (Named(name), position))
        for position, result in enumerate(call.results)
        if result is not None
    ]
    return [whole, *taken]


def _spec(value: Value, name: str | None = None, *, requires_grad: bool = False) -> TensorSpec:
    return TensorSpec(
        name=name or value.name,
        shape=value.shape,
        dtype=value.dtype,
        requires_grad=requires_grad,
    )


def _own_name(entry: State) -> str:
    """A constant has the name the program gives it: its own need not be one of a module's."""
    return entry.value.name if entry.kind == "constant" else entry.name


def _state(entry: State) -> StateTensor:
    value = entry.value
    contiguous, length = [], 1
    for size in reversed(value.shape):
        contiguous.append(length)
        length *= max(size, 1)
    plain = value.strides == tuple(reversed(contiguous)) or 0 in value.shape
    return StateTensor(
        names=(_own_name(entry),),
        shape=value.shape,
        dtype=value.dtype,
        kind=entry.kind,
        requires_grad=entry.kind == "parameter" and value.requires_grad,
        strides=None if plain else value.strides,
        persistent=entry.persistent,
        fill=None if entry.kind == "parameter" else _fill(value),
    )


def _fill(value: Value) -> ConstantFill:
    """Ones where they may be variances, zeros where they may be positions."""
    return ConstantFill(value=1.0 if value.dtype in DIFFERENTIABLE else 0)


def _layer(name: str, kind: str, index: int, parameters: tuple[Parameter, ...]) -> Layer:
    used = [entry for entry in parameters if index in entry.layers]
    return Layer(
        name=name,
        module_type=kind[:200],
        module_fqns=tuple(sorted({entry.names[0].rpartition(".")[0] for entry in used})),
        parameter_bytes=sum(entry.size_bytes for entry in used if entry.kind == "parameter"),
    )


def _sample(value: Value) -> SampleTensor:
    if value.dtype in DIFFERENTIABLE:
        return SampleTensor(shape=value.shape, dtype=value.dtype)
    return SampleTensor(shape=value.shape, dtype=value.dtype, fill="randint", low=0, high=2)


def _structure(program: Exported) -> str:
    names = [value.name for value in program.inputs]
    first_keyword = len(names) - program.keyword_inputs
    return json.dumps({"positional": names[:first_keyword], "keyword": names[first_keyword:]})


def _paths(tree: Mapping[str, Any], count: int) -> tuple[tuple[str | int, ...], ...]:
    """Where each output sits; numbered where the tree is of something else than containers."""
    found: list[tuple[str | int, ...]] = []
    waiting: list[tuple[Any, tuple[str | int, ...]]] = [(tree, ())]
    while waiting and len(found) <= count:
        here, path = waiting.pop()
        children = here.get("children_spec", []) if isinstance(here, dict) else []
        if not children:
            found.append(path)
            continue
        keys = _keys(here, len(children))
        waiting += [(child, (*path, key)) for key, child in zip(keys, children, strict=True)][::-1]
    if len(found) == count and len(set(found)) == count and all(len(p) <= 16 for p in found):
        return tuple(found)
    return tuple((index,) for index in range(count))


def _keys(node: Mapping[str, Any], count: int) -> list[str | int]:
    if node.get("type") == "builtins.dict" and isinstance(node.get("context"), str):
        try:
            keys = json.loads(node["context"])
        except ValueError:
            keys = []
        if isinstance(keys, list) and len(keys) == count:
            return [key if isinstance(key, int) else str(key)[:200] for key in keys]
    return list(range(count))
