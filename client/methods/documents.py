"""Stored profiles and graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from ...core.graph.graph import Graph
from ...core.profile.profile import Profile
from ...core.service.documents import GraphList, ProfileList, Stored, StoredGraph, StoredProfile
from ..model_sources import ModelLike, Upload, describe_model, read_pt2_without_weights
from ..request_builders import build_create, build_get, build_upload, to_json_value
from ..retry import send_with_retries
from ..sans_io import Steps


def model_fields(model: ModelLike, sample: Any) -> Steps[dict[str, Any]]:
    """Return the request fields that describe a model, uploading a ``.pt2`` file first."""
    source = describe_model(model, sample)
    if isinstance(source, Upload):
        return {"graph_id": (yield from upload_pt2(source.path)).id}
    return source


def upload_pt2(path: str | Path) -> Steps[Stored]:
    """Store the graph of an exported program (``torch.export.save``), without its weights.

    Raises:
        InvalidInput: The file is not an exported program, or contains unsupported operations.
    """
    call = build_upload("graphs", "pt2", content=read_pt2_without_weights(Path(path)))
    return (yield from send_with_retries(call)).read(Stored)


def put_graph(graph: Graph) -> Steps[Stored]:
    """Store a graph, to plan from it by its id."""
    call = build_create("graphs", fields=to_json_value(graph))
    return (yield from send_with_retries(call)).read(Stored)


def get_graph(graph_id: str) -> Steps[StoredGraph]:
    """Return a stored graph."""
    return (yield from send_with_retries(build_get("graphs", graph_id))).read(StoredGraph)


def graphs(*, limit: int | None = None, cursor: str | None = None) -> Steps[GraphList]:
    """List stored graphs, newest first."""
    call = build_get("graphs", limit=limit, cursor=cursor)
    return (yield from send_with_retries(call)).read(GraphList)


def put_profile(profile: Profile) -> Steps[Stored]:
    """Store a profile, to plan from it by its id."""
    call = build_create("profiles", fields=to_json_value(profile))
    return (yield from send_with_retries(call)).read(Stored)


def get_profile(profile_id: str) -> Steps[StoredProfile]:
    """Return a stored profile."""
    call = build_get("profiles", profile_id)
    return (yield from send_with_retries(call)).read(StoredProfile)


def profiles(*, limit: int | None = None, cursor: str | None = None) -> Steps[ProfileList]:
    """List stored profiles, newest first."""
    call = build_get("profiles", limit=limit, cursor=cursor)
    return (yield from send_with_retries(call)).read(ProfileList)


def export_profile(profile_id: str, format: Literal["profile", "csv"] = "profile") -> Steps[str]:
    """Return a profile as the text of a file: its JSON document, or CSV with a row per layer."""
    call = build_get("profiles", profile_id, "export", format=format)
    return (yield from send_with_retries(call)).body.decode()
