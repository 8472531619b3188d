"""Validation of large bodies: in a thread, and a slice of each list at a time.

pydantic holds the interpreter's lock for the whole of a call: a profile of 10,000 layers blocked
every other request for a second. Between slices of a few hundred items other threads run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from annotated_types import MaxLen
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

LARGE_BYTES = 256 * 2**10
"""Shorter bodies take a few milliseconds, less than a thread costs under load."""

SLICE = 200
"""Items a slice; a layer takes some 30 microseconds."""


class WrongItems(ValueError):
    """Validation errors of a list's items; the rest of the body has not been validated.

    Args:
        errors: In pydantic's form, located from the start of the body.
    """

    def __init__(self, errors: list[ErrorDetails]) -> None:
        super().__init__(f"{len(errors)} errors")
        self.errors = errors


def in_slices(kind: Any, found: Any, place: tuple[str, ...] = ()) -> Any:
    """Return parsed JSON with the items of its long lists validated, or raise `WrongItems`."""
    model = _model_of(kind)
    if model is None or not isinstance(found, dict):
        return found
    changed: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        key = field.alias or name
        inner = found.get(key)
        most = next((one.max_length for one in field.metadata if isinstance(one, MaxLen)), None)
        if isinstance(inner, list) and most is not None and len(inner) > most:
            continue  # refused for its length, which takes no validation of its items
        if isinstance(inner, list) and len(inner) > SLICE:
            changed[key] = _items(_item_of(field.annotation), inner, (*place, key))
        elif isinstance(inner, dict):
            changed[key] = in_slices(field.annotation, inner, (*place, key))
    return {**found, **changed}


def _items(kind: type[BaseModel] | None, found: list[Any], place: tuple[str, ...]) -> list[Any]:
    """Return a list's validated items, or the list itself if its items are not models."""
    if kind is None:
        return found
    validate = _reader(kind)
    items: list[Any] = []
    for start in range(0, len(found), SLICE):  # other threads run between two slices
        try:
            items += validate(found[start : start + SLICE])
        except ValidationError as error:
            raise WrongItems(_placed(error, place, start)) from None
    return items


def _placed(error: ValidationError, place: tuple[str, ...], start: int) -> list[ErrorDetails]:
    """Return the errors of a slice, located from the start of the body."""
    items = error.errors(include_input=False)
    for item in items:
        index, *inner = item["loc"]
        item["loc"] = (*place, start + int(index), *inner)
    return items


@lru_cache(maxsize=64)
def _reader(kind: type[BaseModel]) -> Callable[[Any], list[Any]]:
    return TypeAdapter(list[kind]).validate_python  # type: ignore[valid-type]


def _model_of(kind: Any) -> type[BaseModel] | None:
    """Return the model of a type that is a model or an optional one."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind
    if get_origin(kind) is Annotated:
        return _model_of(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        models = [_model_of(each) for each in get_args(kind) if each is not type(None)]
        return models[0] if len(models) == 1 else None
    return None


def _item_of(kind: Any) -> type[BaseModel] | None:
    """Return the model of a list type's items."""
    if get_origin(kind) is Annotated:
        return _item_of(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        lists = [each for each in get_args(kind) if each is not type(None)]
        return _item_of(lists[0]) if len(lists) == 1 else None
    if get_origin(kind) in (tuple, list):
        item, *rest = get_args(kind)
        return _model_of(item) if rest in ([], [...]) else None
    return None
