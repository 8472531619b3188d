"""Reading a JSON body strictly: RFC 8259, nothing more, and never an exception of the parser.

Python's own parser takes NaN, lone surrogates and any depth up to its recursion limit; each
comes back later as an error where nobody expects one.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from email.message import Message
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json

from .problems import Problem


class StrictRequest(Request):
    """A request whose ``json`` refuses what RFC 8259 does, and nesting beyond 200 levels."""

    async def json(self) -> Any:
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise Problem(400, "malformed-json", f"the body is not JSON: {error}") from None


class StrictRoute(APIRoute):
    """A route that takes its body as strict JSON and as nothing else."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        takes_body = self.body_field is not None

        async def strict(request: Request) -> Response:
            if takes_body and not _is_json(request.headers.get("content-type", "")):
                raise Problem(
                    415,
                    "unsupported-media-type",
                    "send the body as JSON, with the header 'Content-Type: application/json'",
                    headers={"Accept": "application/json"},
                )
            return await handle(StrictRequest(request.scope, request.receive))

        return strict


def _is_json(content_type: str) -> bool:
    message = Message()
    message["content-type"] = content_type
    subtype = message.get_content_subtype()
    return message.get_content_maintype() == "application" and (
        subtype == "json" or subtype.endswith("+json")
    )
