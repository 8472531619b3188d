"""Arguments of a call as data: containers, dataclasses and constants, with tensors by number.

The form of an argument is JSON. A tensor is its number in the flat list of tensors, as
``{"tensor": 3}``; None, numbers and strings stand for themselves; containers are objects that name
their kind. Classes are named, never imported: a document may come from elsewhere.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from ..core.errors import InvalidInput
from ..core.units import name_type

SAMPLE_CONSTANTS = (bool, int, float, str, type(None))
"""Types of values, other than tensors, that a sample may contain: those of JSON."""

ACCEPTED = "tensors, None, numbers, strings, lists, tuples, dicts and dataclasses"


def describe_argument(
    value: Any, name: str, tensors: dict[str, Tensor], taken: Collection[str]
) -> Any:
    """Return the form of an argument, and add its tensors under names derived from ``name``.

    Raises:
        InvalidInput: It contains something else than `ACCEPTED`.
    """
    if isinstance(value, Tensor):
        tensors[_choose_name(name, {*tensors, *taken})] = value
        return {"tensor": len(tensors) - 1}
    if isinstance(value, SAMPLE_CONSTANTS):
        return value

    def describe(key: Any, item: Any) -> Any:
        return describe_argument(item, f"{name}_{key}", tensors, taken)

    fields = _read_fields(value)
    if fields is not None:
        parts = [[key, describe(key, item)] for key, item in fields.items()]
        return {"class": _name_class(value), "fields": parts}
    if type(value) in (list, tuple):
        parts = [describe(index, item) for index, item in enumerate(value)]
        return {type(value).__name__: parts}
    if type(value) in (dict, OrderedDict) and all(
        isinstance(key, SAMPLE_CONSTANTS) for key in value
    ):
        return {"dict": [[key, describe(key, item)] for key, item in value.items()]}
    raise InvalidInput(f"a sample consists of {ACCEPTED}; {name!r} is {name_type(value)}")


def collect_tensors(form: Any, value: Any, name: str, found: dict[int, Tensor]) -> None:
    """Collect the tensors of an argument that has this form, by number.

    Raises:
        InvalidInput: It has another form, or another constant.
    """
    kind = next(iter(form)) if isinstance(form, dict) else "constant"
    if kind == "tensor":
        if not isinstance(value, Tensor):
            raise InvalidInput(f"input {name!r} is {name_type(value)}, not a tensor")
        found[form["tensor"]] = value
        return
    if kind == "constant":
        # By instance: numpy's floats and string enumerations are written as plain ones.
        is_alike = isinstance(value, type(form)) and isinstance(value, bool) is (
            isinstance(form, bool)
        )
        if not is_alike or value != form:
            raise InvalidInput(
                f"input {name!r} is {_in_short(value)}, but the model was captured with {form!r}: "
                "numbers, strings and None are part of the captured model; profile and plan it "
                "with this value, or pass a tensor"
            )
        return
    items = _find_items(form, kind, value)
    parts = dict(form["fields"] if kind == "class" else enumerate(form[kind]))
    parts = dict(form["dict"]) if kind == "dict" else parts
    if items is None or items.keys() != parts.keys():
        raise InvalidInput(
            f"input {name!r} is {_in_short(value)}, but the model was captured with "
            f"{_describe_form(form, kind, list(parts))}"
        )
    for key, part in parts.items():
        collect_tensors(part, items[key], f"{name}_{key}", found)


def rebuild_argument(form: Any, tensors: Sequence[Any]) -> Any:
    """Return an argument of this form with other tensors.

    Raises:
        InvalidInput: It has a class that this program has not imported.
    """
    if not isinstance(form, dict):
        return form
    ((kind, parts), *rest) = form.items()
    if kind == "tensor":
        return tensors[parts]
    if kind == "class":
        ((_, parts),) = rest
        return _make_instance(
            form["class"], {key: rebuild_argument(part, tensors) for key, part in parts}
        )
    if kind == "dict":
        return {key: rebuild_argument(part, tensors) for key, part in parts}
    made = [rebuild_argument(part, tensors) for part in parts]
    return tuple(made) if kind == "tuple" else made


def _choose_name(name: str, taken: Collection[str]) -> str:
    """Return a name that code may use for an argument, and no other tensor has."""
    name = chosen = re.sub(r"\W", "_", name)
    while chosen in taken:
        chosen += "_"
    return chosen


def _read_fields(value: Any) -> dict[str, Any] | None:
    """Return the fields of a data class's instance or a named tuple; `None` for other values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    return None


def _find_items(form: Any, kind: str, value: Any) -> Mapping[Any, Any] | None:
    """Return the elements of a value of the given kind by key; `None` if it is of another."""
    if kind == "class":
        return _read_fields(value) if _name_class(value) == form["class"] else None
    if kind == "dict":
        return value if isinstance(value, Mapping) else None
    return dict(enumerate(value)) if isinstance(value, list | tuple) else None


def _name_class(value: Any) -> str:
    return f"{type(value).__module__}:{type(value).__qualname__}"


def _make_instance(name: str, fields: Mapping[str, Any]) -> Any:
    """Make an instance of a class that is already imported, without running its constructor."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if isinstance(found, type) and hasattr(found, "_fields") and issubclass(found, tuple):
        return tuple.__new__(found, fields.values())
    if not isinstance(found, type) or not dataclasses.is_dataclass(found):
        raise InvalidInput(
            f"the model was captured with a {path} of {module}, which is not there; import it, or "
            "pass sample="
        )
    made = object.__new__(found) if not issubclass(found, dict) else found.__new__(found)
    for key, value in fields.items():
        object.__setattr__(made, key, value)
        # A ModelOutput of transformers is an ordered dict, too, of the fields that are not None.
        if isinstance(made, OrderedDict) and value is not None:
            OrderedDict.__setitem__(made, key, value)
    return made


def _in_short(value: Any) -> str:
    if isinstance(value, SAMPLE_CONSTANTS):
        return repr(value)
    if isinstance(value, Mapping):
        return f"{name_type(value)} of {', '.join(map(str, value)) or 'nothing'}"
    if isinstance(value, list | tuple):
        return f"{name_type(value)} of {len(value)}"
    return name_type(value)


def _describe_form(form: Any, kind: str, keys: Sequence[Any]) -> str:
    if kind == "class":
        return f"a {form['class'].rpartition('.')[2].rpartition(':')[2]}"
    return f"a {kind} of {', '.join(map(str, keys)) if kind == 'dict' else len(keys)}"
