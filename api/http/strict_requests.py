"""Strict requests: JSON bodies exactly as in RFC 8259, and no unknown or repeated parameters.

A misspelt query parameter would otherwise be ignored silently.

pydantic accepts ``true`` and ``"1"`` as the number 1, which
the documented schema does not. Its strict mode is no alternative: the documents' validators return
Python objects, which strict mode refuses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from email.message import Message
from itertools import islice
from typing import Any, Literal, get_args, get_origin

from fastapi import Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, TypeAdapter, ValidationError

from .field_errors import MAX_ERRORS, FieldError, clip, suggest_name
from .json_bodies import explain_archive, parse_json
from .large_bodies import LARGE_BYTES, WrongItems, in_slices
from .preconditions import check_match
from .problems import Problem, problem_of_validation
from .threads import in_busy_thread

API = "/v1/"


class StrictRequest(Request):
    """Request whose ``json`` is parsed strictly, with at most 200 levels, and validated.

    Attributes:
        adapter: Validates the body, if the route has one.
    """

    adapter: TypeAdapter[Any] | None = None

    async def json(self) -> Any:
        body = await self.body()
        if len(body) >= LARGE_BYTES:
            return await in_busy_thread(self._large, body)
        found = parse_json(body, self.adapter and self.adapter._type)
        if self.adapter is None:
            return found
        try:
            return _checked(self.adapter, found)
        except ValidationError:
            return found  # FastAPI validates it again and reports the errors

    def _large(self, body: bytes) -> Any:
        """Parse and validate in a thread, refusals included, which are slow for large bodies."""
        found = parse_json(body, self.adapter and self.adapter._type)
        if self.adapter is None:
            return found
        try:
            return _checked(self.adapter, found, in_slices(self.adapter._type, found))
        except WrongItems as error:
            wrong = error.errors
        except ValidationError as error:
            wrong = error.errors(include_input=False)
        items = [{**item, "loc": ("body", *item["loc"])} for item in wrong]
        raise problem_of_validation(RequestValidationError(items, body=found), self)


class StrictRoute(APIRoute):
    """Route whose body has to be strict JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        takes_body = self.body_field is not None
        kind = None if self.body_field is None else self.body_field.field_info.annotation
        adapter: TypeAdapter[Any] | None = None if kind is None else TypeAdapter(kind)
        declared = [one.alias for each in _flatten(self.dependant) for one in each.header_params]

        async def handle_strictly(request: Request) -> Response:
            sent = request.headers.get("content-type", "")
            if takes_body and not _is_json(sent):
                raise Problem(
                    415,
                    "unsupported-media-type",
                    "Send the body as JSON with the header 'Content-Type: application/json'."
                    + explain_archive(sent, await request.body()),
                    headers={"Accept": "application/json"},
                )
            if "if-match" not in declared:
                check_match(request.headers, None)
            checked = StrictRequest(request.scope, request.receive)
            checked.adapter = adapter
            return await handle(checked)

        return handle_strictly


def _checked(adapter: TypeAdapter[Any], found: Any, half_read: Any = None) -> Any:
    """Validate a parsed body, or ``half_read``, whose long lists have been validated already."""
    # pydantic converts silently, so the result is compared with the input afterwards.
    value = adapter.validate_python(found if half_read is None else half_read)
    places = find_conversions(value, found)
    if not places:
        return value
    items = [
        {"type": "converted", "loc": ("body", *place), "msg": f"this wants a {kind}"}
        for place, kind in places
    ]
    raise problem_of_validation(RequestValidationError(items, body=found))


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


def find_conversions(value: Any, found: Any) -> list[tuple[Place, Kind]]:
    """Return where pydantic took another type of the JSON ``found`` for a number or a boolean."""
    # bool before int: in Python True is an int, too.
    if isinstance(value, bool):
        return [] if isinstance(found, bool) else [((), "boolean")]
    if isinstance(value, int | float):
        return [((), "number")] if isinstance(found, bool | str) else []
    places: list[tuple[Place, Kind]] = []
    for key, inner, was in _pairs(value, found):
        # Most members are plain and unchanged: this saves a call for each.
        if type(inner) is type(was) and type(was) in PLAIN:
            continue
        places += [((key, *place), kind) for place, kind in find_conversions(inner, was)]
    return places


def _pairs(value: Any, found: Any) -> list[tuple[str | int, Any, Any]]:
    """Return the members of a value, each with the JSON it was made from."""
    if isinstance(value, BaseModel) and isinstance(found, dict):
        fields = type(value).model_fields.items()
        named = [(field.alias or name, name) for name, field in fields]
        return [(key, getattr(value, name), found[key]) for key, name in named if key in found]
    if isinstance(value, dict) and isinstance(found, dict):
        return [(key, value[key], was) for key, was in found.items() if key in value]
    if isinstance(value, tuple | list) and isinstance(found, list) and len(value) == len(found):
        return [(index, *both) for index, both in enumerate(zip(value, found, strict=True))]
    return []


async def check_parameters(request: Request) -> None:
    """Refuse query parameters that are repeated, or that a route of the API does not document."""
    if not request.scope["query_string"]:
        return
    # From the route's own declaration, so that no second list can fall behind.
    known = {
        parameter.alias: _takes_several(parameter.field_info.annotation)
        for each in _flatten(request.scope["route"].dependant)
        for parameter in each.query_params
    }
    wrong: dict[str, str] = {}
    for name, count in Counter(key for key, _ in request.query_params.multi_items()).items():
        if name not in known and request.url.path.startswith(API):
            wrong[name] = "unknown parameter; " + suggest_name(name, known)
        elif count > 1 and not known.get(name, True):
            wrong[name] = f"given {count} times; give it once"
    if wrong:
        errors = [
            FieldError(parameter=clip(name), detail=told)
            for name, told in islice(wrong.items(), MAX_ERRORS)
        ]
        detail = f"{errors[0].parameter}: {errors[0].detail}"
        raise Problem(422, "invalid-input", detail, errors=errors)


def _flatten(dependant: Dependant) -> Iterator[Dependant]:
    """Yield what a route and its dependencies declare."""
    yield dependant
    for inner in dependant.dependencies:
        yield from _flatten(inner)


def _takes_several(kind: Any) -> bool:
    return any(get_origin(each) is list for each in (kind, *get_args(kind)))
