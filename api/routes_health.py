"""``/healthz``: open to everyone, so it says little."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter

from .. import __version__
from ..core.document import Record
from .openapi import PROBLEM_RESPONSE
from .problems import unavailable_problem
from .store.contract import Store


class Health(Record):
    """The server and its database answer."""

    status: Literal["ok"] = "ok"
    version: str
    database: Literal["ok"] = "ok"


def health_routes(store: Store) -> APIRouter:
    """The route a load balancer asks."""
    router = APIRouter(tags=["health"], responses=PROBLEM_RESPONSE)

    @router.get("/healthz")
    def healthz() -> Health:
        """Whether this server can do its work."""
        try:
            store.check()
        except Exception as error:  # noqa: BLE001 - whatever it is, the answer is the same
            raise unavailable_problem(error) from None
        return Health(version=__version__)

    return router
