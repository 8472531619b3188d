"""Profiles and graphs: keeping and reading them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from ...core.graph.graph import Graph
from ...core.profile.profile import Profile
from ...core.service.documents import GraphList, ProfileList, StoredGraph, StoredProfile
from ...core.service.stored import Stored
from ..model_sources import ModelLike, Upload, read_pt2, source_of
from ..request_builders import create, get, plain, upload
from ..retry import exchange
from ..sans_io import Steps


def model_fields(model: ModelLike, sample: Any) -> Steps[dict[str, Any]]:
    """The fields of a request that say what the model is; a ``.pt2`` file is sent first."""
    source = source_of(model, sample)
    if isinstance(source, Upload):
        return {"graph_id": (yield from upload_pt2(source.path)).id}
    return source


def upload_pt2(path: str | Path) -> Steps[Stored]:
    """Keep the graph of an exported program (``torch.export.save``), without its weights.

    Raises:
        InvalidInput: The file is no such thing, or holds what a graph may not.
    """
    call = upload("graphs", "pt2", content=read_pt2(Path(path)))
    return (yield from exchange(call)).read(Stored)


def put_graph(graph: Graph) -> Steps[Stored]:
    """Keep a graph, to plan from it by its id."""
    call = create("graphs", fields=plain(graph))
    return (yield from exchange(call)).read(Stored)


def get_graph(graph_id: str) -> Steps[StoredGraph]:
    """A stored graph.

    Raises:
        NotFound: There is none.
    """
    return (yield from exchange(get("graphs", graph_id))).read(StoredGraph)


def graphs(*, limit: int | None = None, cursor: str | None = None) -> Steps[GraphList]:
    """Stored graphs, newest first."""
    call = get("graphs", limit=limit, cursor=cursor)
    return (yield from exchange(call)).read(GraphList)


def put_profile(profile: Profile) -> Steps[Stored]:
    """Keep a profile, to plan from it by its id."""
    call = create("profiles", fields=plain(profile))
    return (yield from exchange(call)).read(Stored)


def get_profile(profile_id: str) -> Steps[StoredProfile]:
    """A stored profile.

    Raises:
        NotFound: There is none.
    """
    call = get("profiles", profile_id)
    return (yield from exchange(call)).read(StoredProfile)


def profiles(*, limit: int | None = None, cursor: str | None = None) -> Steps[ProfileList]:
    """Stored profiles, newest first."""
    call = get("profiles", limit=limit, cursor=cursor)
    return (yield from exchange(call)).read(ProfileList)


def export_profile(profile_id: str, format: Literal["profile", "csv"] = "profile") -> Steps[str]:
    """The profile as text of a file: for the command line, or a row a layer."""
    call = get("profiles", profile_id, "export", format=format)
    return (yield from exchange(call)).body.decode()
