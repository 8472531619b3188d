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
from ..http.preconditions import CHANGED, Precondition
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
    strict_router,
)

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


@graphs.post("", status_code=201, response_model=Stored)
async def create_graph(
    planning: ThePlanning,
    graph: Annotated[Graph, Body(openapi_examples=GRAPH_EXAMPLES)],
    creation: TheCreation,
) -> Response:
    """Store the graph that ``stagewright capture`` wrote, to plan from it.

    A ``.pt2`` file is refused: ``stagewright capture`` makes a graph of it, where torch is.
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
