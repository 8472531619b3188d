"""Checks that a graph is safe and complete enough to be rebuilt and run, without torch.

Names become attributes and lines of generated code, so they consist of letters, digits, ``_`` and,
between dots, ``-``. Every operation is on the list, every reference is to an earlier value, and
sizes are bounded.
"""

from __future__ import annotations

import keyword
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from itertools import chain
from math import prod
from typing import TYPE_CHECKING

from .allowed_ops import GETITEM, MODULES, OPERATORS
from .arguments import Argument, InputReference, NodeReference, StateReference
from .tensors import StateTensor, ValuesFill

if TYPE_CHECKING:
    from .graph import Graph, LeafModule, Operation, Region

MAX_OPERATIONS = 200_000
MAX_STATE = 200_000
MAX_ELEMENTS = 2**40
"""Largest tensor accepted: a thousand times the largest known embedding."""
MAX_STATE_ELEMENTS = 2**44
MAX_WRITTEN = 2**20
"""Most elements listed one by one, over all buffers and constants."""
MAX_RECURRENT_LAYERS = 128
"""Most layers of one LSTM, GRU or RNN; each allocates several tensors."""
MAX_SETTING = 2**24
"""Largest number accepted as a constructor argument: classes, channels, vocabulary."""

NODE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,199}")
QUALIFIED_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}(\.[A-Za-z0-9_-]{1,100}){0,63}")


def check_rebuildable(graph: Graph) -> None:
    """Check a graph that claims to be rebuildable; raise `ValueError` with what is accepted."""
    # Sizes first: the later checks walk over everything, which must not take unbounded time.
    _check_sizes(graph)
    _check_state(graph)
    _check_modules(graph)
    _Walk(graph).check()
    _check_ends(graph)


def _check_sizes(graph: Graph) -> None:
    count = len(graph.operations) + sum(len(region.operations) for region in graph.regions)
    for found, limit, what in (
        (count, MAX_OPERATIONS, "operations"),
        (len(graph.state), MAX_STATE, "tensors of state"),
        (len(graph.modules), MAX_OPERATIONS, "modules"),
        (len(graph.regions), MAX_OPERATIONS, "regions"),
    ):
        _check_most(found, limit, f"{found} {what}")
    for operation in chain(graph.operations, *(region.operations for region in graph.regions)):
        for tensor in operation.outputs:
            _check_elements(tensor.shape, f"operation {operation.name!r}")
    for tensor in graph.inputs:
        _check_variable(tensor.name, "the name of an input")
        _check_elements(tensor.shape, f"input {tensor.name!r}")


def _check_most(found: int, limit: int, what: str) -> None:
    if found > limit:
        raise ValueError(f"{what}; at most {limit} are accepted")


def _check_elements(shape: Iterable[int], what: str) -> int:
    count = prod(shape)
    _check_most(count, MAX_ELEMENTS, f"{what} has {count} elements")
    return count


def _check_state(graph: Graph) -> None:
    names: set[str] = set()
    total = written = 0
    for tensor in graph.state:
        for name in tensor.names:
            _check_name(name, QUALIFIED_NAME, "the name of a parameter, buffer or constant")
            if name in names:
                raise ValueError(f"two tensors of the state are named {name!r}")
            names.add(name)
        total += _check_elements(tensor.shape, f"state {tensor.names[0]!r}")
        written += _check_fill(tensor)
    _check_most(total, MAX_STATE_ELEMENTS, f"the state has {total} elements")
    _check_most(written, MAX_WRITTEN, f"{written} elements are written out")
    leaves = [module.name for module in graph.modules]
    # Names become a tree of modules, in which a path leads to a tensor or to a module, not to
    # both.
    for name in [*names, *leaves]:
        parts = name.split(".")
        for length in range(1, len(parts)):
            if ".".join(parts[:length]) in names:
                raise ValueError(
                    f"{'.'.join(parts[:length])!r} is a tensor, so there is no {name!r} inside it"
                )


def _check_fill(tensor: StateTensor) -> int:
    """Check a tensor's strides and fill; return the number of elements it lists one by one."""
    name, fill = tensor.names[0], tensor.fill
    if tensor.strides is not None:
        if len(tensor.strides) != len(tensor.shape):
            raise ValueError(
                f"state {name!r} has {len(tensor.shape)} dimensions but "
                f"{len(tensor.strides)} strides"
            )
        # A view with wide strides would allocate far more than its number of elements.
        reach = sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True)
        )
        if prod(tensor.shape) and reach >= 2 * prod(tensor.shape):
            raise ValueError(f"the strides of state {name!r} leave most of its memory unused")
    # Weights may be drawn at random. The values of buffers and constants, such as indices and
    # masks, can decide what is computed, so they must be described.
    if fill is None:
        if tensor.kind != "parameter":
            raise ValueError(f"{tensor.kind} {name!r} needs a fill")
        return 0
    if fill.kind == "integers" and fill.low >= fill.high:
        raise ValueError(f"state {name!r}: low ({fill.low}) must be below high ({fill.high})")
    if fill.kind == "causal" and len(tensor.shape) < 2:
        raise ValueError(f"state {name!r} needs two dimensions to be filled causally")
    if not isinstance(fill, ValuesFill):
        return 0
    if len(fill.values) != prod(tensor.shape):
        raise ValueError(
            f"state {name!r} of shape {list(tensor.shape)} has {len(fill.values)} values"
        )
    return len(fill.values)


def _check_modules(graph: Graph) -> None:
    names: set[str] = set()
    holders = Counter(name.rpartition(".")[0] for tensor in graph.state for name in tensor.names)
    for module in graph.modules:
        _check_name(module.name, QUALIFIED_NAME, "the name of a module")
        if module.name in names:
            raise ValueError(f"two modules are named {module.name!r}")
        names.add(module.name)
        _check_settings(module)
        _check_recurrent_layers(module, holders[module.name])
    for name in names:
        parts = name.split(".")
        outer = next((p for n in range(1, len(parts)) if (p := ".".join(parts[:n])) in names), None)
        if outer is not None:
            raise ValueError(f"module {outer!r} is a leaf, so it cannot contain {name!r}")


def _check_settings(module: LeafModule) -> None:
    allowed = MODULES.get(module.type)
    if allowed is None:
        raise ValueError(
            f"module {module.name!r} is a {module.type!r}, which a graph may not call; capture the "
            "model with this release"
        )
    for key, value in module.settings.items():
        if key not in allowed:
            raise ValueError(
                f"module {module.name!r}: {module.type} does not accept {key!r}; it accepts "
                f"{', '.join(sorted(allowed)) or 'nothing'}"
            )
        # Most numbers become sizes of what the constructor allocates.
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, int | float) and abs(item) > MAX_SETTING and key not in _FACTORS:
                raise ValueError(
                    f"module {module.name!r}: {key} is {item}; at most {MAX_SETTING} is accepted"
                )


def _check_recurrent_layers(module: LeafModule, num_tensors: int) -> None:
    """Check the only modules whose number of tensors is given by a constructor argument."""
    layers = module.settings.get("num_layers", 1)
    if not isinstance(layers, int):
        raise ValueError(f"module {module.name!r}: num_layers is {layers!r}, not an integer")
    if layers > MAX_RECURRENT_LAYERS:
        raise ValueError(
            f"module {module.name!r}: num_layers is {layers}; at most {MAX_RECURRENT_LAYERS} is "
            "accepted"
        )
    # A sender has to list as many tensors as it makes the constructor build.
    if "num_layers" in module.settings and num_tensors < 2 * layers:
        raise ValueError(
            f"module {module.name!r} has {layers} layers of at least two tensors each, but the "
            f"state lists only {num_tensors}"
        )


_FACTORS = ("value", "threshold", "alpha", "beta", "min_val", "max_val")
"""Constructor arguments used only in arithmetic, whose magnitude costs nothing."""


class _Walk:
    """One pass over the operations in order, tracking the values defined so far."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._modules = {module.name for module in graph.modules}
        self._regions = {region.name: region for region in graph.regions}
        self._state = {name for tensor in graph.state for name in tensor.names}
        self._inputs = {tensor.name for tensor in graph.inputs}

    def check(self) -> None:
        if len(self._regions) != len(self._graph.regions):
            raise ValueError("two regions have the same name")
        if len(self._inputs) != len(self._graph.inputs):
            raise ValueError("two inputs have the same name")
        for region in self._graph.regions:
            self._check_region(region)
        made = self._operations(self._graph.operations, set(), self._inputs)
        for argument in self._graph.returns:
            self._check_argument(argument, made, self._inputs, "the model's output")

    def _operations(
        self, operations: Iterable[Operation], made: set[str], inputs: Set[str]
    ) -> set[str]:
        for operation in operations:
            _check_name(operation.name, NODE_NAME, "the name of an operation")
            if operation.name in made:
                raise ValueError(f"two operations are named {operation.name!r}")
            if operation.layer >= len(self._graph.layers):
                raise ValueError(
                    f"operation {operation.name!r} is in layer {operation.layer}, but there are "
                    f"{len(self._graph.layers)} layers"
                )
            self._check_target(operation)
            what = f"operation {operation.name!r}"
            for argument in (*operation.arguments, *operation.keywords.values()):
                self._check_argument(argument, made, inputs, what)
            for name in operation.keywords:
                _check_variable(name, f"a keyword of {what}")
            # Last: an operation may read earlier ones only, so there are no cycles.
            made.add(operation.name)
        return made

    def _check_target(self, operation: Operation) -> None:
        target = operation.target
        if operation.kind == "module":
            known = target in self._modules
        elif operation.kind == "region":
            known = target in self._regions
            if known and len(operation.arguments) != len(self._regions[target].inputs):
                raise ValueError(
                    f"region {target!r} takes {len(self._regions[target].inputs)} arguments, not "
                    f"{len(operation.arguments)}"
                )
        elif operation.kind == "function":
            known = target in OPERATORS or target == GETITEM
        else:
            known = False
        if not known:
            raise ValueError(
                f"operation {operation.name!r} calls {target!r} (a {operation.kind}), which is not "
                "on the list of allowed operations; capture the model with this release, or "
                "measure it where its code is available"
            )

    def _check_region(self, region: Region) -> None:
        _check_name(region.name, NODE_NAME, "the name of a region")
        for name in region.inputs:
            _check_variable(name, f"an input of region {region.name!r}")
        names = set(region.inputs)
        if len(names) != len(region.inputs):
            raise ValueError(f"two inputs of region {region.name!r} have the same name")
        for operation in region.operations:
            if operation.kind != "function" or any(
                isinstance(item, StateReference) for item in _items(operation)
            ):
                raise ValueError(
                    f"region {region.name!r} contains {operation.name!r}; a region may contain "
                    "only operators applied to its inputs"
                )
        # Inside a region its inputs are the only values; the graph around it is out of reach.
        made = self._operations(region.operations, names, frozenset())
        for argument in region.returns:
            self._check_argument(argument, made, frozenset(), f"region {region.name!r}")

    def _check_argument(
        self, argument: Argument, made: set[str], inputs: Set[str], what: str
    ) -> None:
        for item in argument if isinstance(argument, tuple) else (argument,):
            if isinstance(item, NodeReference) and item.node not in made:
                raise ValueError(f"{what} reads {item.node!r}, which no earlier operation defines")
            if isinstance(item, InputReference) and item.input not in inputs:
                raise ValueError(f"{what} reads {item.input!r}, which is not an input")
            if isinstance(item, StateReference) and item.state not in self._state:
                raise ValueError(f"{what} reads {item.state!r}, which is not in the state")


def _items(operation: Operation) -> Iterator[Argument]:
    for value in (*operation.arguments, *operation.keywords.values()):
        yield from value if isinstance(value, tuple) else (value,)


def _check_ends(graph: Graph) -> None:
    if graph.sample is None:
        raise ValueError("a rebuildable graph needs a sample")
    named = {tensor.name: tensor for tensor in graph.inputs}
    # The inputs' sizes are checked above; equal shapes keep the sample within the same limits.
    if set(graph.sample.inputs) != set(named):
        raise ValueError("the sample's inputs differ from the graph's")
    for name, made in graph.sample.inputs.items():
        if tuple(made.shape) != tuple(named[name].shape) or made.dtype != named[name].dtype:
            raise ValueError(f"the sample's {name!r} differs from the input in shape or dtype")
    if len(graph.output_paths) != len(graph.returns):
        raise ValueError(
            f"{len(graph.returns)} returned values but {len(graph.output_paths)} output paths"
        )
    if len(set(graph.output_paths)) != len(graph.output_paths):
        raise ValueError("two returned values have the same output path")


def _check_name(name: str, pattern: re.Pattern[str], what: str) -> None:
    # `fullmatch`, because `$` would let a name end with a newline, in code to be generated.
    if not pattern.fullmatch(name):
        raise ValueError(f"{what} is {name!r}; it must match {pattern.pattern}")


def _check_variable(name: str, what: str) -> None:
    # These names are written into generated code as parameters or keywords.
    _check_name(name, NODE_NAME, what)
    if keyword.iskeyword(name) or name == "__debug__":
        raise ValueError(f"{what} is {name!r}, which is a Python keyword; use another name")
