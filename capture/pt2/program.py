"""Programs as ``torch.export`` serializes them: JSON in, plain records out.

The format is torch's (``torch/_export/serde/schema.py``, major version 8); only what a `Graph`
can hold is read. Symbolic expressions (dynamic sizes) are rejected and never evaluated. An
operator's name is compared with the list of allowed operators and never looked up in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic_core import from_json

from ...core.document import MAX_NAME
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
from .subgraphs import CAPTURE_INSTEAD, inline_subgraphs

T = TypeVar("T")

SCHEMA_MAJOR = 8

DTYPES: dict[int, DType] = {
    1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float16", 7: "float32",
    8: "float64", 10: "complex64", 11: "complex128", 12: "bool", 13: "bfloat16",
    29: "float8_e4m3fn", 30: "float8_e5m2",
}  # fmt: skip
"""Scalar types by torch's ``ScalarType`` number."""

MEMORY_FORMATS: dict[int, Literal["contiguous_format", "channels_last", "channels_last_3d",
                                  "preserve_format"]] = {
    1: "contiguous_format", 2: "channels_last", 3: "channels_last_3d", 4: "preserve_format",
}  # fmt: skip
STRIDED = 7
"""Number of torch's strided layout, the only one accepted."""

KEYWORD_ARGUMENT = 2
"""Argument kind of torch's schema; 1 is positional."""

ASSERTIONS = frozenset(
    ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range")
)
"""Operators that compute nothing, inserted by torch.export; they are left out of graphs."""

StateKind = Literal["parameter", "buffer", "constant"]
STATE_KINDS: dict[str, StateKind] = {
    "parameter": "parameter", "buffer": "buffer", "tensor_constant": "constant",
}  # fmt: skip
"""Kinds of state by what the program's signature calls them."""

MAX_PATH_PARTS = 64
"""Modules inside one another. Paths of 20,000 took a gigabyte: each has all its parents' paths."""

CONTRADICTIONS = (
    ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""What reading raises where a program does not fit torch's schema, or its parts each other. That is
not validated up front."""

PLACEMENT_KEYWORDS = ("device", "pin_memory", "layout")
"""Keywords that say only where a result is placed."""


@dataclass(frozen=True)
class ExportedTensor:
    name: str
    shape: tuple[int, ...]
    dtype: DType
    requires_grad: bool
    strides: tuple[int, ...]


@dataclass(frozen=True)
class ExportedState:
    """A parameter, buffer or constant; ``tensor.name`` is its name inside the program."""

    tensor: ExportedTensor
    name: str
    kind: StateKind
    persistent: bool = True


@dataclass(frozen=True)
class TensorUse:
    """Reference to a tensor in an operator's arguments."""

    name: str


@dataclass(frozen=True)
class OperatorCall:
    """One operator with its arguments, tensors among them as `TensorUse`.

    Attributes:
        target: Operator and overload, such as ``aten.add.Tensor``.
        keywords: Keyword arguments, without those that only place a result.
        results: Names of the resulting tensors; `None` for an optional one that is not computed.
        is_list: Whether the operator returns one list of tensors.
        stack: Key and path of every module the operator ran in, outermost first.
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
class ExportedProgram:
    """A program with nested graphs inlined, its operator calls in execution order.

    Attributes:
        state: Parameters, buffers and constants.
        modules: Paths of the model's modules.
        keyword_inputs: Number of inputs passed by name; they are the last ones.
        result_tree: Structure of the result, as torch's pytree serializes it.
    """

    calls: tuple[OperatorCall, ...]
    tensors: Mapping[str, ExportedTensor]
    inputs: tuple[ExportedTensor, ...]
    state: tuple[ExportedState, ...]
    outputs: tuple[Any, ...]
    modules: tuple[str, ...]
    keyword_inputs: int
    result_tree: Mapping[str, Any]


def parse_program(text: bytes) -> ExportedProgram:
    """Parse a program's JSON; raise `InvalidInput` for what a graph cannot hold."""
    try:
        return _read_program(from_json(text, allow_inf_nan=False))
    except InvalidInput:
        raise
    except CONTRADICTIONS as error:
        raise contradiction(error) from None


def contradiction(error: Exception) -> InvalidInput:
    """Return the refusal of a program that cannot be read."""
    return InvalidInput(
        "the program is not as torch.export writes it "
        f"({type(error).__name__}: {str(error)[:200]}); {CAPTURE_INSTEAD}"
    )


def _read_program(data: Any) -> ExportedProgram:
    major = data["schema_version"]["major"]
    if major != SCHEMA_MAJOR:
        raise InvalidInput(
            f"the program is in torch's export format {major!r}, and this release reads "
            f"{SCHEMA_MAJOR}; {CAPTURE_INSTEAD}"
        )
    module = data["graph_module"]
    nodes, metadata = inline_subgraphs(module["graph"])
    tensors = {name: _read_tensor(name, meta) for name, meta in metadata.items()}
    signature, modules = module["signature"], module["module_call_graph"]
    inputs, state = _read_inputs(signature["input_specs"], tensors)
    # The entry without a path is the model itself; its signature has the trees of a call.
    root = next((entry["signature"] for entry in modules if entry["fqn"] == ""), None) or {}
    return ExportedProgram(
        calls=tuple(
            _read_call(node)
            for node in nodes
            if ASSERTIONS.isdisjoint(_operator(node).split(".")[1:2])
        ),
        tensors=tensors,
        inputs=inputs,
        state=state,
        outputs=tuple(
            _read_argument(entry["arg"])
            for spec in signature["output_specs"]
            for kind, entry in spec.items()
            if kind == "user_output"  # the others are updated buffers
        ),
        modules=tuple(_path(entry["fqn"]) for entry in modules if entry["fqn"]),
        keyword_inputs=_count_keyword_inputs(_read_tree(root.get("in_spec")), len(inputs)),
        result_tree=_read_tree(root.get("out_spec")),
    )


def _read_inputs(
    specs: list[dict[str, Any]], tensors: Mapping[str, ExportedTensor]
) -> tuple[tuple[ExportedTensor, ...], tuple[ExportedState, ...]]:
    inputs: list[ExportedTensor] = []
    state: list[ExportedState] = []
    for spec in specs:
        ((kind, entry),) = spec.items()
        if kind == "user_input":
            ((form, argument),) = entry["arg"].items()
            if form != "as_tensor":
                raise InvalidInput(
                    "the program takes an input that is not a tensor; export it with tensor "
                    f"inputs only, or {CAPTURE_INSTEAD}"
                )
            inputs.append(tensors[argument["name"]])
        elif kind in STATE_KINDS:
            state.append(
                ExportedState(
                    tensors[entry["arg"]["name"]],
                    _path(entry[f"{kind}_name"]),
                    STATE_KINDS[kind],
                    kind != "buffer" or entry["persistent"] is True,
                )
            )
        elif kind != "constant_input":
            raise InvalidInput(f"the program takes a {kind[:80]!r}; {CAPTURE_INSTEAD}")
    return tuple(inputs), tuple(state)


def _read_tensor(name: str, meta: Mapping[str, Any]) -> ExportedTensor:
    dtype = DTYPES.get(meta["dtype"])
    if dtype is None:
        raise InvalidInput(f"tensor {name[:80]!r} has a data type that a graph cannot hold")
    if meta["layout"] != STRIDED:
        raise InvalidInput(f"tensor {name[:80]!r} does not have the plain (strided) layout")

    def read_size(size: Mapping[str, Any]) -> int:
        if size.get("as_int") is None:
            raise InvalidInput(
                f"a size of tensor {name[:80]!r} is dynamic; export the model without "
                "dynamic_shapes, at the micro-batch size to plan for"
            )
        return _integer(size["as_int"])

    return ExportedTensor(
        name=_name(name),
        shape=tuple(map(read_size, meta["sizes"])),
        dtype=dtype,
        requires_grad=meta["requires_grad"] is True,
        strides=tuple(map(read_size, meta["strides"])),
    )


def _operator(node: Mapping[str, Any]) -> str:
    return _name(node["target"]).removeprefix("torch.ops.")


def _read_call(node: Mapping[str, Any]) -> OperatorCall:
    target = _operator(node)
    if target not in OPERATORS:
        raise InvalidInput(
            f"the program calls {target[:200]!r}, which is not on the list of allowed operators; "
            f"{CAPTURE_INSTEAD}"
        )
    arguments, keywords = [], {}
    for given in node["inputs"]:
        if given.get("kind") != KEYWORD_ARGUMENT:
            arguments.append(_read_argument(given["arg"]))
        elif given["name"] not in PLACEMENT_KEYWORDS:
            keywords[_name(given["name"])] = _read_argument(given["arg"])
    outputs = node["outputs"]
    is_list = len(outputs) == 1 and "as_tensors" in outputs[0]
    if is_list:
        outputs = [{"as_tensor": one} for one in outputs[0]["as_tensors"]]
    # "key,path,class;key,path,class;...", outermost module first
    modules = _text(node["metadata"].get("nn_module_stack", ""))
    stack = [entry.split(",", 2) for entry in modules.split(";")] if modules else []
    if len(stack) > MAX_PATH_PARTS:
        raise InvalidInput(
            f"an operation ran in {len(stack)} modules inside one another; at most "
            f"{MAX_PATH_PARTS} are accepted"
        )
    return OperatorCall(
        target=target,
        arguments=tuple(arguments),
        keywords=keywords,
        results=tuple(map(_read_result, outputs)),
        is_list=is_list,
        stack=tuple((_name(key), _path(path)) for key, path, _ in stack),
        kinds=tuple(_name(kind).rpartition(".")[2] for _, _, kind in stack),
    )


def _read_result(output: Mapping[str, Any]) -> str | None:
    ((form, value),) = output.items()
    if form == "as_none":
        return None
    if form != "as_tensor":
        raise InvalidInput(f"an operator returns something other than tensors; {CAPTURE_INSTEAD}")
    return _name(value["name"])


def _read_argument(given: Mapping[str, Any]) -> Any:
    ((form, value),) = given.items()
    if form in _LISTS:
        return tuple(map(_LISTS[form], value))
    if form in _SCALARS:
        return _SCALARS[form](value)
    raise InvalidInput(f"an argument is given {form[:40]!r}; {CAPTURE_INSTEAD}")


def _tensor_use(value: Any) -> TensorUse:
    return TensorUse(_name(value["name"]))


def _optional_tensor(given: Mapping[str, Any]) -> TensorUse | None:
    ((form, value),) = given.items()
    return _tensor_use(value) if form == "as_tensor" else None


def _static_integer(given: Mapping[str, Any]) -> int:
    if "as_int" not in given:
        raise InvalidInput(
            "the program computes with dynamic sizes; export the model without dynamic_shapes"
        )
    return _integer(given["as_int"])


def _float(value: Any) -> float | SpecialFloat:
    special = {"Infinity": "inf", "-Infinity": "-inf", "NaN": "nan"}
    if isinstance(value, str):
        return SpecialFloat.model_validate({"special": special[value]})
    return float(value)


def _check_layout(value: Any) -> None:
    if value != STRIDED:
        raise InvalidInput("an argument asks for a layout that is not strided")


def _make_type_check(kind: type[T], what: str) -> Callable[[Any], T]:
    def check(value: Any) -> T:
        if type(value) is not kind:  # not isinstance: a bool is an int too
            raise TypeError(f"{str(value)[:40]!r} is not {what}")
        return value

    return check


_integer = _make_type_check(int, "an integer")
_boolean = _make_type_check(bool, "a boolean")
_text = _make_type_check(str, "a string")


def _name(value: Any) -> str:
    """Check a name of a tensor, an operator or a class."""
    if len(name := _text(value)) > MAX_NAME:
        raise InvalidInput(
            f"the program has a name of {len(name)} characters, beginning with {name[:40]!r}; at "
            f"most {MAX_NAME} are accepted"
        )
    return name


def _path(value: Any) -> str:
    """Check the path of a module, a parameter or a buffer."""
    if (parts := _name(value).count(".") + 1) > MAX_PATH_PARTS:
        raise InvalidInput(
            f"the program has a path of {parts} parts, {value[:40]!r} and so on; at most "
            f"{MAX_PATH_PARTS} are accepted"
        )
    return str(value)


_SCALARS: dict[str, Callable[[Any], TensorUse | Element]] = {
    "as_none": lambda _: None,
    "as_tensor": _tensor_use,
    "as_optional_tensor": _optional_tensor,
    "as_int": _integer,
    "as_sym_int": _static_integer,
    "as_float": _float,
    "as_string": _text,
    "as_bool": _boolean,
    "as_scalar_type": lambda value: DTypeArgument(dtype=DTYPES[value]),
    "as_memory_format": lambda value: MemoryFormatArgument(memory_format=MEMORY_FORMATS[value]),
    "as_layout": _check_layout,
    "as_device": lambda _: DeviceArgument(),
}
_LISTS: dict[str, Callable[[Any], TensorUse | Argument]] = {
    "as_tensors": _tensor_use,
    "as_optional_tensors": _optional_tensor,
    "as_ints": _integer,
    "as_sym_ints": _static_integer,
    "as_floats": _float,
    "as_strings": _text,
    "as_bools": _boolean,
}


def _read_tree(spec: Any) -> Mapping[str, Any]:
    """Return the tree of a serialized pytree ``[version, tree]``; empty if there is none."""
    if not isinstance(spec, str):
        return {}
    tree = from_json(spec)[1]
    return tree if isinstance(tree, dict) else {}


def _count_keyword_inputs(tree: Mapping[str, Any], num_inputs: int) -> int:
    """Return the number of inputs passed by name; 0 unless every argument is one tensor."""
    parts = tree.get("children_spec", [])
    if len(parts) != 2:
        return 0
    positional, named = (part.get("children_spec", []) for part in parts)
    flat = all(leaf.get("type") is None for leaf in (*positional, *named))
    return len(named) if flat and len(positional) + len(named) == num_inputs else 0
