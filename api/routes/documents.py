"""``/v1/profiles`` and ``/v1/graphs``: stored profiles and model graphs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Body, Response
from fastapi.routing import APIRoute
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.routing import Match
from starlette.types import Scope

from ...core.graph.graph import Graph
from ...core.profile.profile import Profile
from ...core.service.documents import GraphList, ProfileList, StoredGraph, StoredProfile
from ..auth.access import CurrentPrincipal
from ..http.examples import GRAPH_EXAMPLES, PROFILE_EXAMPLES
from ..http.pagination import Cursor, Limit, blame_parameter
from ..http.preconditions import CHANGED, Precondition
from ..http.strict_requests import ARCHIVES
from ..model_sources.pt2_upload import ProgramReader
from ..planning.exports import ProfileFormat, profile_text
from ..planning.service import Planning
from ..store.records import Stored
from .dependencies import (
    TAGGED,
    Creation,
    TheCreation,
    ThePlanning,
    TheReading,
    TheStore,
    created,
    from_state,
    strict_router,
)

PT2_BODY = {
    "requestBody": {
        "description": "A graph, or a file written by torch.export.save, of which only the "
        "program's JSON is read; weights can be left out (zip -d model.pt2 '*/data/*').",
        "content": {kind: {"schema": {"type": "string", "format": "binary"}} for kind in ARCHIVES},
    }
}

profiles = strict_router("/v1/profiles", "profiles")
graphs = strict_router("/v1/graphs", "graphs")


async def _create(planning: Planning, creation: Creation, document: Profile | Graph) -> Response:
    stored = await planning.create(creation.principal.project_id, document)
    kind = "graphs" if isinstance(document, Graph) else "profiles"
    return created(stored.model_dump_json(), f"/v1/{kind}/{stored.id}")


@profiles.post("", status_code=201, response_model=Stored)
async def create_profile(
    planning: ThePlanning,
    profile: Annotated[Profile, Body(openapi_examples=PROFILE_EXAMPLES)],
    creation: TheCreation,
) -> Response:
    """Store a profile; plans can then name it by its id."""
    return await creation.once(lambda: _create(planning, creation, profile))


@profiles.get("")
def list_profiles(
    store: TheStore, principal: CurrentPrincipal, limit: Limit = 50, cursor: Cursor = None
) -> ProfileList:
    """List profiles, newest first."""
    with blame_parameter("cursor"):
        page = store.documents.profiles(principal.project_id, limit=limit, cursor=cursor)
    return ProfileList(profiles=page.items, next_cursor=page.next_cursor)


@profiles.get(
    "/{profile_id}",
    response_model=StoredProfile | Profile,
    responses={
        **TAGGED,
        200: {
            "description": "The profile, or the file that `format` asks for.",
            "content": {"text/csv": {"schema": {"type": "string"}}},
        },
    },
)
async def get_profile(
    planning: ThePlanning, profile_id: str, reading: TheReading, format: ProfileFormat | None = None
) -> Response:
    """Return a profile, or a file of it: for the command line, or CSV with one row per layer."""
    tag, stored = await run_in_threadpool(reading.document, "profile", profile_id)
    if format is None:
        return reading.respond(tag, stored)
    media_type, ending = ("text/csv", "csv") if format == "csv" else ("application/json", "json")
    return await reading.respond_derived(
        f"{profile_id}.{format}",
        lambda: planning.run_in_solver(reading.principal, profile_text, stored, format),
        media_type,
        f"{profile_id}.{ending}",
    )


@profiles.delete("/{profile_id}", status_code=204, responses=CHANGED)
def delete_profile(
    store: TheStore, profile_id: str, principal: CurrentPrincipal, check_tag: Precondition
) -> None:
    """Delete a profile that no plan names; 409 if one does."""
    store.documents.delete("profile", principal.project_id, profile_id, check_tag)


class ArchiveRoute(APIRoute):
    """A route that takes archives only, whatever other routes take at its path."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        kind = Headers(scope=scope).get("content-type", "").partition(";")[0].strip().lower()
        return super().matches(scope) if kind in ARCHIVES else (Match.NONE, {})


archives = APIRouter(prefix="/v1/graphs", route_class=ArchiveRoute, include_in_schema=False)
"""Comes before `graphs`, whose ``POST`` documents it."""


@archives.post("", status_code=201)
async def create_graph_from_pt2(
    planning: ThePlanning,
    reader: Annotated[ProgramReader, from_state("program_reader")],
    creation: TheCreation,
) -> Response:
    """Store the graph of an exported program."""
    body = await creation.request.body()

    async def make() -> Response:
        return await _create(
            planning, creation, await reader.read(body, creation.principal.project_id)
        )

    return await creation.once(make)


@graphs.post("", status_code=201, response_model=Stored, openapi_extra=PT2_BODY)
async def create_graph(
    planning: ThePlanning,
    graph: Annotated[Graph, Body(openapi_examples=GRAPH_EXAMPLES)],
    creation: TheCreation,
) -> Response:
    """Store the graph that ``stagewright capture`` or ``torch.export.save`` wrote, to plan from it.

    A graph is sent as JSON, an exported program (``.pt2``) as ``application/octet-stream``. No code
    in the file is run.
    """
    return await creation.once(lambda: _create(planning, creation, graph))


@graphs.get("")
def list_graphs(
    store: TheStore, principal: CurrentPrincipal, limit: Limit = 50, cursor: Cursor = None
) -> GraphList:
    """List graphs, newest first."""
    with blame_parameter("cursor"):
        page = store.documents.graphs(principal.project_id, limit=limit, cursor=cursor)
    return GraphList(graphs=page.items, next_cursor=page.next_cursor)


@graphs.get("/{graph_id}", response_model=StoredGraph, responses=TAGGED)
def get_graph(graph_id: str, reading: TheReading) -> Response:
    """Return a graph."""
    return reading.respond(*reading.document("graph", graph_id))


@graphs.delete("/{graph_id}", status_code=204, responses=CHANGED)
def delete_graph(
    store: TheStore, graph_id: str, principal: CurrentPrincipal, check_tag: Precondition
) -> None:
    """Delete a graph; profiles and plans made from it stay."""
    store.documents.delete("graph", principal.project_id, graph_id, check_tag)
