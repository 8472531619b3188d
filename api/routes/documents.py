"""``/v1/profiles`` and ``/v1/graphs``: stored profiles and model graphs."""

from __future__ import annotations

from typing import Annotated

from fastapi import Body, Response
from starlette.concurrency import run_in_threadpool

from ...core.graph.graph import Graph
from ...core.profile.profile import Profile
from ...core.service.documents import GraphList, ProfileList, StoredGraph, StoredProfile
from ..auth.access import CurrentPrincipal
from ..http.examples import GRAPH_EXAMPLES, PROFILE_EXAMPLES
from ..http.pagination import Cursor, Limit, blame_parameter
from ..http.problems import Problem
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


@profiles.get("/{profile_id}", response_model=StoredProfile, responses=TAGGED)
def get_profile(profile_id: str, reading: TheReading) -> Response:
    """Return a profile."""
    return reading.respond(profile_id, reading.document("profile", profile_id))


@profiles.get(
    "/{profile_id}/export",
    response_model=Profile,
    responses={
        **TAGGED,
        200: {
            "description": "The file; JSON unless it is CSV.",
            "content": {"text/csv": {"schema": {"type": "string"}}},
        },
    },
)
async def export_profile(
    planning: ThePlanning, profile_id: str, format: ProfileFormat, reading: TheReading
) -> Response:
    """Export the profile as a file: JSON for the command line, or CSV with one row per layer."""
    stored = await run_in_threadpool(reading.document, "profile", profile_id)
    media_type, ending = ("text/csv", "csv") if format == "csv" else ("application/json", "json")
    return await reading.respond_derived(
        f"{profile_id}.{format}",
        lambda: planning.run_in_solver(profile_text, stored, format),
        media_type,
        f"{profile_id}.{ending}",
    )


@graphs.post("", status_code=201, response_model=Stored)
async def create_graph(
    planning: ThePlanning,
    graph: Annotated[Graph, Body(openapi_examples=GRAPH_EXAMPLES)],
    creation: TheCreation,
) -> Response:
    """Store a graph written by ``stagewright capture``; plans can then name it by its id."""
    return await creation.once(lambda: _create(planning, creation, graph))


@graphs.post("/pt2", status_code=201, response_model=Stored, openapi_extra=PT2_BODY)
async def create_graph_from_pt2(
    planning: ThePlanning,
    reader: Annotated[ProgramReader, from_state("program_reader")],
    creation: TheCreation,
) -> Response:
    """Store the graph of an exported program (``.pt2``). No code in the file is run."""
    request = creation.request
    if request.headers.get("content-type", "").partition(";")[0].strip() not in ARCHIVES:
        raise Problem(
            415,
            "unsupported-media-type",
            "send the .pt2 file itself, with the header 'Content-Type: application/octet-stream'",
            headers={"Accept": ", ".join(ARCHIVES)},
        )
    body = await request.body()

    async def make() -> Response:
        return await _create(planning, creation, await reader.read(body))

    return await creation.once(make)


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
    return reading.respond(graph_id, reading.document("graph", graph_id))
