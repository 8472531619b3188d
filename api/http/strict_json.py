"""Reading a JSON body strictly: RFC 8259, nothing more, and never an exception of the parser.

Python's own parser takes NaN, lone surrogates and any depth up to its recursion limit; each
comes back later as an error where nobody expects one. And pydantic takes ``true`` and ``"1"`` for
the number 1, which the documented schema does not.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from email.message import Message
from typing import Any, Literal

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import from_json

from .large_bodies import LARGE_BYTES, WrongItems, in_slices
from .problems import Problem, from_validation
from .threads import in_busy_thread


class StrictRequest(Request):
    """A request whose ``json`` refuses what RFC 8259 does, and nesting beyond 200 levels.

    Attributes:
        wanted: What the body has to fit; it is then given as that.
    """

    wanted: TypeAdapter[Any] | None = None

    async def json(self) -> Any:
        body = await self.body()
        if len(body) >= LARGE_BYTES:
            return await in_busy_thread(self._large, body)
        found = _read(body)
        if self.wanted is None:
            return found
        try:
            return _checked(self.wanted, found)
        except ValidationError:
            return found  # FastAPI says why it does not fit

    def _large(self, body: bytes) -> Any:
        """As `json`; what does not fit is refused here, where no other request has to wait."""
        found = _read(body)
        if self.wanted is None:
            return found
        try:
            return _checked(self.wanted, found, in_slices(self.wanted._type, found))
        except WrongItems as error:
            wrong = error.errors
        except ValidationError as error:
            wrong = error.errors(include_input=False)
        items = [{**item, "loc": ("body", *item["loc"])} for item in wrong]
        raise from_validation(RequestValidationError(items, body=found), self)


class StrictRoute(APIRoute):
    """A route that takes its body as strict JSON and as nothing else."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        takes_body = self.body_field is not None
        kind = None if self.body_field is None else self.body_field.field_info.annotation
        wanted: TypeAdapter[Any] | None = None if kind is None else TypeAdapter(kind)

        async def strict(request: Request) -> Response:
            if takes_body and not _is_json(request.headers.get("content-type", "")):
                raise Problem(
                    415,
                    "unsupported-media-type",
                    "send the body as JSON, with the header 'Content-Type: application/json'",
                    headers={"Accept": "application/json"},
                )
            checked = StrictRequest(request.scope, request.receive)
            checked.wanted = wanted
            return await handle(checked)

        return strict


def _read(body: bytes) -> Any:
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Problem(400, "malformed-json", f"the body is not JSON: {error}") from None


def _checked(wanted: TypeAdapter[Any], found: Any, half_read: Any = None) -> Any:
    """The body as what it has to fit.

    A whole number may be written 8.0, which JSON Schema takes for the same.

    Args:
        wanted: What it has to fit.
        found: The body.
        half_read: The same, with parts of it validated.

    Raises:
        ValidationError: It does not fit.
        Problem: 422: it fits only because pydantic took ``true`` or a text for a number.
    """
    value = wanted.validate_python(found if half_read is None else half_read)
    places = converted(value, found)
    if not places:
        return value
    items = [
        {"type": "converted", "loc": ("body", *place), "msg": f"this wants a {kind}"}
        for place, kind in places
    ]
    raise from_validation(RequestValidationError(items, body=found))


def _is_json(content_type: str) -> bool:
    message = Message()
    message["content-type"] = content_type
    subtype = message.get_content_subtype()
    return message.get_content_maintype() == "application" and (
        subtype == "json" or subtype.endswith("+json")
    )


Kind = Literal["number", "boolean"]
Place = tuple[str | int, ...]

PLAIN = frozenset({int, float, str, bool, type(None)})


def converted(value: Any, found: Any) -> list[tuple[Place, Kind]]:
    """Where a number or a boolean was something else, and what it is now.

    Args:
        value: As validated.
        found: The JSON it was made from.
    """
    if isinstance(value, bool):
        return [] if isinstance(found, bool) else [((), "boolean")]
    if isinstance(value, int | float):
        return [((), "number")] if isinstance(found, bool | str) else []
    places: list[tuple[Place, Kind]] = []
    for key, inner, was in _pairs(value, found):
        if type(inner) is type(was) and type(was) in PLAIN:
            continue
        places += [((key, *place), kind) for place, kind in converted(inner, was)]
    return places


def _pairs(value: Any, found: Any) -> list[tuple[str | int, Any, Any]]:
    """What is inside, each with what it was made from."""
    if isinstance(value, BaseModel) and isinstance(found, dict):
        fields = type(value).model_fields.items()
        named = [(field.alias or name, name) for name, field in fields]
        return [(key, getattr(value, name), found[key]) for key, name in named if key in found]
    if isinstance(value, dict) and isinstance(found, dict):
        return [(key, value[key], was) for key, was in found.items() if key in value]
    if isinstance(value, tuple | list) and isinstance(found, list) and len(value) == len(found):
        return [(index, *both) for index, both in enumerate(zip(value, found, strict=True))]
    return []
