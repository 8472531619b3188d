"""Bodies of megabytes: read in threads, and a little at a time.

A thread lets others on while it runs Python, but pydantic is one long call: a profile of 10,000
layers stopped every other request for a second. Its lists are validated by a few hundred items.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError

LARGE_BYTES = 256 * 2**10
"""What is shorter is validated in a few milliseconds, less than a thread costs under load."""

SLICE = 200
"""Items at a time; a layer takes some 30 microseconds."""


def in_slices(kind: Any, found: Any) -> Any:
    """What fits ``kind`` as well, the items of its long lists validated; anything else as it is.

    Args:
        kind: A model, or what holds one.
        found: JSON as read; not changed.
    """
    model = _model_of(kind)
    if model is None or not isinstance(found, dict):
        return found
    changed: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        key = field.alias or name
        inner = found.get(key)
        if isinstance(inner, list) and len(inner) > SLICE:
            changed[key] = _items(_item_of(field.annotation), inner)
        elif isinstance(inner, dict):
            changed[key] = in_slices(field.annotation, inner)
    return {**found, **changed}


def _items(kind: type[BaseModel] | None, found: list[Any]) -> list[Any]:
    """Items of a list, validated; as they are if one does not fit, for the whole to say where."""
    if kind is None:
        return found
    validate = _reader(kind)
    items: list[Any] = []
    try:
        for start in range(0, len(found), SLICE):
            items += validate(found[start : start + SLICE])
    except ValidationError:
        return found
    return items


@lru_cache(maxsize=64)
def _reader(kind: type[BaseModel]) -> Callable[[Any], list[Any]]:
    return TypeAdapter(list[kind]).validate_python  # type: ignore[valid-type]


def _model_of(kind: Any) -> type[BaseModel] | None:
    """The one model that a type stands for, if it is one and nothing else but `None`."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind
    if get_origin(kind) is Annotated:
        return _model_of(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        models = [_model_of(each) for each in get_args(kind) if each is not type(None)]
        return models[0] if len(models) == 1 else None
    return None


def _item_of(kind: Any) -> type[BaseModel] | None:
    """The model of a list's items."""
    if get_origin(kind) is Annotated:
        return _item_of(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        lists = [each for each in get_args(kind) if each is not type(None)]
        return _item_of(lists[0]) if len(lists) == 1 else None
    if get_origin(kind) in (tuple, list):
        item, *rest = get_args(kind)
        return _model_of(item) if rest in ([], [...]) else None
    return None
