"""A program as ``torch.export`` writes it, read as data: JSON in, plain records out.

The format is torch's (``torch/_export/serde/schema.py``, major version 8). Only what a graph of
ours has is read. Expressions (sizes that vary) are refused and never evaluated; a target is a
name to be found on our list of operators, never one to be looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic_core import from_json

from ...core.errors import InvalidInput
from ...core.graph.allowed_ops import OPERATORS
from ...core.graph.arguments import (
    Argument,
    DeviceArgument,
    DTypeArgument,
    Element,
    MemoryFormatArgument,
    SpecialFloat,
)
from ...core.graph.tensors import DType

SCHEMA_MAJOR = 8

DTYPES: dict[int, DType] = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32",
    8: "float64", 10: "complex64", 11: "complex128", 12: "bool", 13: "bfloat16",
    29: "float8_e4m3fn", 30: "float8_e5m2",
}  # fmt: skip
"""torch's numbers of scalar types."""

FORMATS: dict[int, Literal["contiguous_format", "channels_last", "channels_last_3d",
                           "preserve_format"]] = {
    1: "contiguous_format", 2: "channels_last", 3: "channels_last_3d", 4: "preserve_format",
}  # fmt: skip
STRIDED = 7
"""torch's number of the only layout there is here."""

CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range")
"""Operators that compute nothing, as in `capture.targets`."""

WHERE_ALONE = ("device", "pin_memory", "layout")
"""Keywords that say where a result is placed."""

CAPTURE_INSTEAD = "make the graph with 'stagewright capture' where the model is, and send that"


@dataclass(frozen=True)
class Value:
    """A tensor by name."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    requires_grad: bool
    strides: tuple[int, ...]


@dataclass(frozen=True)
class State:
    """A parameter, buffer or constant: what the program calls it, and its own name."""

    value: Value
    name: str
    kind: Literal["parameter", "buffer", "constant"]
    persistent: bool = True


@dataclass(frozen=True)
class Call:
    """One operator with its arguments; tensors among them are `Named`.

    Attributes:
        results: Names of the tensors it makes; of an optional one it does not make, `None`.
        is_list: Whether it returns one list of them.
        stack: Key and path of every module it ran in, outermost first.
        kinds: Class names of those modules.
    """

    target: str
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    results: tuple[str | None, ...]
    is_list: bool
    stack: tuple[tuple[str, str], ...]
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class Named:
    """A use of a tensor."""

    name: str


@dataclass(frozen=True)
class Exported:
    """A program.

    Attributes:
        values: Every tensor, by name.
        modules: Paths of the model's modules.
        keyword_inputs: How many of the inputs, the last ones, are given by name.
        result_tree: Shape of what it returns, as torch writes it.
    """

    calls: tuple[Call, ...]
    values: Mapping[str, Value]
    inputs: tuple[Value, ...]
    state: tuple[State, ...]
    outputs: tuple[Any, ...]
    modules: tuple[str, ...]
    keyword_inputs: int
    result_tree: Mapping[str, Any]


def read_exported(text: bytes) -> Exported:
    """A program from its JSON.

    Raises:
        InvalidInput: It is not as torch.export writes it, or has what a graph cannot hold.
    """
    try:
        return _Reader(from_json(text, allow_inf_nan=False)).read()
    except InvalidInput:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise InvalidInput(
            "the program is not as torch.export writes it "
            f"({type(error).__name__}: {str(error)[:200]}); {CAPTURE_INSTEAD}"
        ) from None


class _Reader:
    def __init__(self, data: Any) -> None:
        major = data["schema_version"]["major"]
        if major != SCHEMA_MAJOR:
            raise InvalidInput(
                f"the program is of torch's export format {major!r}, and this release reads "
                f"{SCHEMA_MAJOR}; {CAPTURE_INSTEAD}"
            )
        self._module = data["graph_module"]
        self._graph = self._module["graph"]

    def read(self) -> Exported:
        graph = self._graph
        nodes, tensors = inlined(graph)
        values = {name: _value(name, meta) for name, meta in tensors.items()}
        inputs, state = self._inputs(values)
        calls = self._module["module_call_graph"]
        whole = next((entry["signature"] for entry in calls if entry["fqn"] == ""), None) or {}
        return Exported(
            calls=tuple(_call(node) for node in nodes if not _is_check(node)),
            values=values,
            inputs=inputs,
            state=state,
            outputs=self._outputs(),
            modules=tuple(_text(entry["fqn"]) for entry in calls if entry["fqn"]),
            keyword_inputs=_keyword_inputs(_tree(whole.get("in_spec")), len(inputs)),
            result_tree=_tree(whole.get("out_spec")),
        )

    def _inputs(self, values: Mapping[str, Value]) -> tuple[tuple[Value, ...], tuple[State, ...]]:
        inputs: list[Value] = []
        state: list[State] = []
        for spec in self._module["signature"]["input_specs"]:
            ((kind, entry),) = spec.items()
            if kind == "user_input":
                ((form, argument),) = entry["arg"].items()
                if form != "as_tensor":
                    raise InvalidInput(
                        "the program takes an input that is not a tensor; export it with tensors "
                        f"alone, or {CAPTURE_INSTEAD}"
                    )
                inputs.append(values[argument["name"]])
            elif kind == "parameter":
                value = values[entry["arg"]["name"]]
                state.append(State(value, _text(entry["parameter_name"]), "parameter"))
            elif kind == "buffer":
                value, kept = values[entry["arg"]["name"]], entry["persistent"] is True
                state.append(State(value, _text(entry["buffer_name"]), "buffer", kept))
            elif kind == "tensor_constant":
                value = values[entry["arg"]["name"]]
                state.append(State(value, _text(entry["tensor_constant_name"]), "constant"))
            elif kind != "constant_input":
                raise InvalidInput(f"the program takes a {kind[:80]!r}; {CAPTURE_INSTEAD}")
        return tuple(inputs), tuple(state)

    def _outputs(self) -> tuple[Any, ...]:
        return tuple(
            _argument(entry["arg"])
            for spec in self._module["signature"]["output_specs"]
            for kind, entry in spec.items()
            if kind == "user_output"
        )


def _value(name: str, meta: Mapping[str, Any]) -> Value:
    dtype = DTYPES.get(meta["dtype"])
    if dtype is None:
        raise InvalidInput(f"tensor {name[:80]!r} is of a type that a graph cannot hold")
    if meta["layout"] != STRIDED:
        raise InvalidInput(f"tensor {name[:80]!r} is not a plain (strided) one")
    return Value(
        name=_text(name),
        shape=tuple(_size(size, name) for size in meta["sizes"]),
        dtype=dtype,
        requires_grad=meta["requires_grad"] is True,
        strides=tuple(_size(stride, name) for stride in meta["strides"]),
    )


def _size(size: Mapping[str, Any], name: str) -> int:
    number = size.get("as_int")
    if number is None:
        raise InvalidInput(
            f"a size of tensor {name[:80]!r} varies; export the model without dynamic_shapes, at "
            "the micro-batch size to plan for"
        )
    return _whole(number)


def _is_check(node: Mapping[str, Any]) -> bool:
    return _operator(node["target"]).split(".")[1:2] in [[check] for check in CHECKS]


def _operator(target: str) -> str:
    return _text(target).removeprefix("torch.ops.")


def _call(node: Mapping[str, Any]) -> Call:
    target = _operator(node["target"])
    if target not in OPERATORS:
        raise InvalidInput(
            f"the program calls {target[:200]!r}, which is not on the list of what a graph may "
            f"do; {CAPTURE_INSTEAD}"
        )
    arguments, keywords = [], {}
    for given in node["inputs"]:
        if given.get("kind") == 2:
            if given["name"] not in WHERE_ALONE:
                keywords[_text(given["name"])] = _argument(given["arg"])
        else:
            arguments.append(_argument(given["arg"]))
    outputs = node["outputs"]
    is_list = len(outputs) == 1 and "as_tensors" in outputs[0]
    named = [{"as_tensor": one} for one in outputs[0]["as_tensors"]] if is_list else outputs
    stack = [entry.split(",", 2) for entry in _stack(node)]
    return Call(
        target=target,
        arguments=tuple(arguments),
        keywords=keywords,
        results=tuple(_result(output) for output in named),
        is_list=is_list,
        stack=tuple((key, path) for key, path, _ in stack),
        kinds=tuple(kind.rpartition(".")[2] for _, _, kind in stack),
    )


def _stack(node: Mapping[str, Any]) -> list[str]:
    text = _text(node["metadata"].get("nn_module_stack", ""))
    return text.split(";") if text else []


def _result(output: Mapping[str, Any]) -> str | None:
    ((form, value),) = output.items()
    if form == "as_none":
        return None
    if form != "as_tensor":
        raise InvalidInput(f"an operation makes something else than tensors; {CAPTURE_INSTEAD}")
    return _text(value["name"])


def _argument(given: Mapping[str, Any]) -> Any:
    ((form, value),) = given.items()
    if form in _LISTS:
        return tuple(_LISTS[form](item) for item in value)
    if form in _SINGLE:
        return _SINGLE[form](value)
    raise InvalidInput(f"an argument is given {form[:40]!r}; {CAPTURE_INSTEAD}")


def _optional(given: Mapping[str, Any]) -> Named | None:
    ((form, value),) = given.items()
    return Named(_text(value["name"])) if form == "as_tensor" else None


def _symbolic(given: Mapping[str, Any]) -> int:
    if "as_int" not in given:
        raise InvalidInput(
            "the program computes with sizes that vary; export the model without dynamic_shapes"
        )
    return _whole(given["as_int"])


def _number(value: Any) -> float | SpecialFloat:
    special = {"Infinity": "inf", "-Infinity": "-inf", "NaN": "nan"}
    if isinstance(value, str):
        return SpecialFloat.model_validate({"special": special[value]})
    return float(value)


def _layout(value: Any) -> None:
    if value != STRIDED:
        raise InvalidInput("an argument asks for a layout that is not strided")


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{str(value)[:40]!r} is no whole number")
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise TypeError(f"{str(value)[:40]!r} is no truth value")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:40]!r} is no text")
    return value


_SINGLE: dict[str, Callable[[Any], Named | Element]] = {
    "as_none": lambda _: None,
    "as_tensor": lambda value: Named(_text(value["name"])),
    "as_optional_tensor": _optional,
    "as_int": _whole,
    "as_sym_int": _symbolic,
    "as_float": _number,
    "as_string": _text,
    "as_bool": _flag,
    "as_scalar_type": lambda value: DTypeArgument(dtype=DTYPES[value]),
    "as_memory_format": lambda value: MemoryFormatArgument(memory_format=FORMATS[value]),
    "as_layout": _layout,
    "as_device": lambda _: DeviceArgument(),
}
_LISTS: dict[str, Callable[[Any], Named | Argument]] = {
    "as_tensors": _SINGLE["as_tensor"],
    "as_optional_tensors": _optional,
    "as_ints": _whole,
    "as_sym_ints": _symbolic,
    "as_floats": _number,
    "as_strings": _text,
    "as_bools": _flag,
}


def _tree(spec: Any) -> Mapping[str, Any]:
    """What torch's pytree writes: a version and a tree; empty where there is none."""
    if not isinstance(spec, str):
        return {}
    tree = from_json(spec)[1]
    return tree if isinstance(tree, dict) else {}


def _keyword_inputs(tree: Mapping[str, Any], num_inputs: int) -> int:
    """How many inputs are given by name, if positions and names hold one tensor each."""
    parts = tree.get("children_spec", [])
    if len(parts) != 2:
        return 0
    positional, named = (part.get("children_spec", []) for part in parts)
    flat = all(leaf.get("type") is None for leaf in (*positional, *named))
    return len(named) if flat and len(positional) + len(named) == num_inputs else 0


NO_GRADIENTS = "torch.ops.higher_order.wrap_with_set_grad_enabled"
AUTOCAST = "torch.ops.higher_order.wrap_with_autocast"
MAX_NODES = 200_000


def inlined(graph: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Nodes and tensors of a program's graph, with those of the graphs inside it.

    Raises:
        InvalidInput: There is autocast, or there are too many nodes.
        KeyError, TypeError: It is not as torch.export writes it.
    """
    values = dict(graph["tensor_values"])
    nodes = []
    for node in _nodes(graph["nodes"], {}, values):
        nodes.append(node)
        if len(nodes) > MAX_NODES:
            raise InvalidInput(f"the program has more than the {MAX_NODES} operations accepted")
    return nodes, values


def _nodes(
    nodes: list[dict[str, Any]], names: Mapping[str, str], values: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    for node in nodes:
        renamed = _renamed(node, names)
        if node["target"] in (NO_GRADIENTS, AUTOCAST):
            yield from _inside(renamed, values)
        else:
            yield renamed


def _inside(node: dict[str, Any], values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    given = [entry["arg"] for entry in node["inputs"]]
    position = next(index for index, entry in enumerate(given) if "as_graph" in entry)
    if node["target"] == AUTOCAST and given[2].get("as_bool") is not False:
        raise InvalidInput(
            "the program runs under autocast; export the model without it, converted to the type "
            "it is to run in"
        )
    graph = given[position]["as_graph"]["graph"]
    outputs = node["outputs"]
    made = [
        entry["name"]
        for output in outputs
        for entry in (output["as_tensors"] if "as_tensors" in output else [output["as_tensor"]])
    ]
    outer = [entry["as_tensor"]["name"] for entry in given[position + 1 :]]
    inner = [entry["as_tensor"]["name"] for entry in graph["inputs"]]
    names = {name: f"{made[0]}__{name}" for name in graph["tensor_values"]}
    values.update({names[name]: meta for name, meta in graph["tensor_values"].items()})
    names |= dict(zip(inner, outer, strict=True))
    yield from _nodes(graph["nodes"], names, values)
    ends = [names[entry["as_tensor"]["name"]] for entry in graph["outputs"]]
    stops = node["target"] == NO_GRADIENTS and given[0].get("as_bool") is False
    metadata = graph["nodes"][-1]["metadata"] if graph["nodes"] else {}
    for result, end in zip(made, ends, strict=True):
        yield {
            "target": f"torch.ops.aten.{'detach' if stops else 'alias'}.default",
            "inputs": [{"name": "self", "arg": {"as_tensor": {"name": end}}, "kind": 1}],
            "outputs": [{"as_tensor": {"name": result}}],
            "metadata": metadata,
        }


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    """The same with other names of tensors, down to the graphs inside."""
    if not names:
        return value
    if isinstance(value, dict):
        return {
            key: _tensor(item, names)
            if key in ("as_tensor", "as_tensors")
            else (item if key == "as_graph" else _renamed(item, names))
            for key, item in value.items()
        }
    return [_renamed(item, names) for item in value] if isinstance(value, list) else value


def _tensor(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, list):
        return [_tensor(item, names) for item in value]
    return {"name": names.get(value["name"], value["name"])}
