"""Paths of the first release: each redirects to what replaced it, for one release."""

from __future__ import annotations

from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from starlette.responses import RedirectResponse

MOVED = {
    "/v1/plans/{plan_id}/schedule": ("GET", "/v1/plans/{plan_id}?format=schedule"),
    "/v1/plans/{plan_id}/timeline": ("GET", "/v1/plans/{plan_id}?format=timeline"),
    "/v1/plans/{plan_id}/export": ("GET", "/v1/plans/{plan_id}?{query}"),
    "/v1/profiles/{profile_id}/export": ("GET", "/v1/profiles/{profile_id}?{query}"),
    "/v1/graphs/pt2": ("POST", "/v1/graphs"),
    "/v1/accelerators": ("GET", "/v1/capabilities"),
    "/v1/model-families": ("GET", "/v1/capabilities"),
    "/v1/model-families/{family}": ("GET", "/v1/capabilities"),
}
"""Method and new address by old path. What moved into the capabilities is there in a field of its
old name."""

router = APIRouter(include_in_schema=False)


def _add(old: str, method: str, new: str) -> None:
    async def redirect(request: Request) -> Response:
        # Quoted again: the id is the client's text, decoded, and goes into a header.
        place = {name: quote(text, safe="") for name, text in request.path_params.items()}
        # 308 and not 307 or 301: for good, and with the method and body of the request.
        return RedirectResponse(new.format(query=request.url.query, **place), 308)

    router.add_route(old, redirect, methods=[method])


for _old, (_method, _new) in MOVED.items():
    _add(_old, _method, _new)
