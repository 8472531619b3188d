"""``/v1/graphs``: stored model graphs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Request, Response

from ...core.graph.graph import Graph
from ...core.service.documents import GraphList, StoredGraph
from ..auth.access import CurrentPrincipal
from ..http.examples import graph_examples
from ..http.pagination import Cursor, Limit, cursor_checked
from ..http.problems import Problem
from ..http.strict_requests import StrictRoute
from ..model_sources.pt2_upload import ProgramReader
from ..openapi import PROBLEM_RESPONSE
from ..store.records import Stored
from .dependencies import ThePlanning, TheStore, from_state
from .idempotency import TAGGED, IdempotencyKey, IfNoneMatch, created, once, tagged

ARCHIVES = ("application/octet-stream", "application/zip")
"""Media types accepted for a ``.pt2`` file."""

PT2_BODY = {
    "requestBody": {
        "required": True,
        "description": "A file written by torch.export.save. Only its program's JSON is read; "
        "weights can be left out (zip -d model.pt2 '*/data/*').",
        "content": {kind: {"schema": {"type": "string", "format": "binary"}} for kind in ARCHIVES},
    }
}

router = APIRouter(
    prefix="/v1/graphs", tags=["graphs"], route_class=StrictRoute, responses=PROBLEM_RESPONSE
)


@router.post("", status_code=201, response_model=Stored)
async def create_graph(
    planning: ThePlanning,
    store: TheStore,
    graph: Annotated[Graph, Body(openapi_examples=graph_examples())],
    request: Request,
    principal: CurrentPrincipal,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Store a graph written by ``stagewright capture``; plans can then name it by its id."""

    async def make() -> Response:
        stored = await planning.create_graph(principal.project_id, graph)
        return created(stored.model_dump_json(), f"/v1/graphs/{stored.id}")

    return await once(store.idempotency, principal, request, make)


@router.post("/pt2", status_code=201, response_model=Stored, openapi_extra=PT2_BODY)
async def create_graph_from_pt2(
    planning: ThePlanning,
    store: TheStore,
    reader: Annotated[ProgramReader, from_state("program_reader")],
    request: Request,
    principal: CurrentPrincipal,
    idempotency_key: IdempotencyKey = None,
) -> Response:
    """Store the graph of an exported program (``.pt2``). No code in the file is run."""
    if request.headers.get("content-type", "").partition(";")[0].strip() not in ARCHIVES:
        raise Problem(
            415,
            "unsupported-media-type",
            "send the .pt2 file itself, with the header 'Content-Type: application/octet-stream'",
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
    store: TheStore, principal: CurrentPrincipal, limit: Limit = 50, cursor: Cursor = None
) -> GraphList:
    """List graphs, newest first."""
    with cursor_checked():
        page = store.documents.graphs(principal.project_id, limit=limit, cursor=cursor)
    return GraphList(graphs=page.items, next_cursor=page.next_cursor)


@router.get("/{graph_id}", response_model=StoredGraph, responses=TAGGED)
def get_graph(
    store: TheStore,
    graph_id: str,
    request: Request,
    principal: CurrentPrincipal,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Return a graph."""
    return tagged(request, graph_id, store.documents.graph_json(principal.project_id, graph_id))
