"""``/v1/graphs``."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Request, Response

from ...core.graph.graph import Graph
from ...core.service.documents import GraphList, StoredGraph
from ..auth.principal import CurrentPrincipal
from ..http.examples import graph_examples
from ..http.pagination import Cursor, Limit, cursor_checked
from ..http.problems import Problem
from ..http.strict_json import StrictRoute
from ..model_sources.pt2_upload import ProgramReader
from ..openapi import PROBLEM_RESPONSE
from ..planning.service import Planning
from ..store.base import Store
from ..store.records import Stored
from .idempotency import TAGGED, IdempotencyKey, IfNoneMatch, created, once, tagged

ARCHIVES = ("application/octet-stream", "application/zip")
"""What a ``.pt2`` file is sent as."""

PT2_BODY = {
    "requestBody": {
        "required": True,
        "description": "What torch.export.save wrote. Its program's JSON is read and nothing else; "
        "weights can be left out (zip -d model.pt2 '*/data/*').",
        "content": {kind: {"schema": {"type": "string", "format": "binary"}} for kind in ARCHIVES},
    }
}


def graph_routes(planning: Planning, store: Store, reader: ProgramReader) -> APIRouter:
    """Routes that keep and read graphs."""
    router = APIRouter(
        prefix="/v1/graphs", tags=["graphs"], route_class=StrictRoute, responses=PROBLEM_RESPONSE
    )

    @router.post("", status_code=201, response_model=Stored)
    async def create_graph(
        graph: Annotated[Graph, Body(openapi_examples=graph_examples())],
        request: Request,
        principal: CurrentPrincipal,
        idempotency_key: IdempotencyKey = None,
    ) -> Response:
        """Keep a graph that ``stagewright capture`` made, to plan from it by its id."""

        async def make() -> Response:
            stored = await planning.create_graph(principal.project_id, graph)
            return created(stored.model_dump_json(), f"/v1/graphs/{stored.id}")

        return await once(store.idempotency, principal, request, make)

    @router.post("/pt2", status_code=201, response_model=Stored, openapi_extra=PT2_BODY)
    async def create_graph_from_pt2(
        request: Request, principal: CurrentPrincipal, idempotency_key: IdempotencyKey = None
    ) -> Response:
        """Keep the graph of an exported program (``.pt2``). Nothing of the file is run."""
        if request.headers.get("content-type", "").partition(";")[0].strip() not in ARCHIVES:
            raise Problem(
                415,
                "unsupported-media-type",
                "send the .pt2 file itself, with the header "
                "'Content-Type: application/octet-stream'",
                headers={"Accept": ", ".join(ARCHIVES)},
            )
        body = await request.body()

        async def make() -> Response:
            graph = await reader.read(body)
            stored = await planning.create_graph(principal.project_id, graph)
            return created(stored.model_dump_json(), f"/v1/graphs/{stored.id}")

        return await once(store.idempotency, principal, request, make)

    @router.get("")
    def list_graphs(
        principal: CurrentPrincipal, limit: Limit = 50, cursor: Cursor = None
    ) -> GraphList:
        """Graphs, newest first."""
        with cursor_checked():
            page = store.documents.graphs(principal.project_id, limit=limit, cursor=cursor)
        return GraphList(graphs=page.items, next_cursor=page.next_cursor)

    @router.get("/{graph_id}", response_model=StoredGraph, responses=TAGGED)
    def get_graph(
        graph_id: str,
        request: Request,
        principal: CurrentPrincipal,
        if_none_match: IfNoneMatch = None,
    ) -> Response:
        """A graph."""
        found = store.documents.graph_json(principal.project_id, graph_id)
        return tagged(request, graph_id, lambda: found)

    return router
