"""Stored profiles and graphs, the service's catalogue, and API keys (scope ``admin``)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Literal

from ...core.cluster.cluster import Cluster
from ...core.graph.graph import Graph
from ...core.profile.profile import Profile
from ...core.service.catalogue import Capabilities
from ...core.service.documents import GraphList, ProfileList, Stored, StoredGraph, StoredProfile
from ...core.service.keys import ApiKey, KeyList, NewApiKey, Project, ProjectList, Quotas
from ..request_builders import (
    build_create,
    build_delete,
    build_get,
    build_once,
    drop_none,
    to_json_value,
)
from ..retry import ask, delete, send_with_retries
from ..sans_io import Steps


def put_graph(graph: Graph) -> Steps[Stored]:
    """Store a graph, to plan from it by its id."""
    return (yield from ask(build_create("graphs", fields=to_json_value(graph)), Stored))


def get_graph(graph_id: str) -> Steps[StoredGraph]:
    """Return a stored graph."""
    return (yield from ask(build_get("graphs", graph_id), StoredGraph))


def graphs(*, limit: int | None = None, cursor: str | None = None) -> Steps[GraphList]:
    """List stored graphs, newest first."""
    return (yield from ask(build_get("graphs", limit=limit, cursor=cursor), GraphList))


def delete_graph(graph_id: str) -> Steps[None]:
    """Delete a graph; profiles and plans made from it stay."""
    yield from delete(build_delete("graphs", graph_id))


def put_profile(profile: Profile) -> Steps[Stored]:
    """Store a profile, to plan from it by its id."""
    return (yield from ask(build_create("profiles", fields=to_json_value(profile)), Stored))


def get_profile(profile_id: str) -> Steps[StoredProfile]:
    """Return a stored profile."""
    return (yield from ask(build_get("profiles", profile_id), StoredProfile))


def profiles(*, limit: int | None = None, cursor: str | None = None) -> Steps[ProfileList]:
    """List stored profiles, newest first."""
    return (yield from ask(build_get("profiles", limit=limit, cursor=cursor), ProfileList))


def export_profile(profile_id: str, format: Literal["profile", "csv"] = "profile") -> Steps[str]:
    """Return a profile as the text of a file: its JSON document, or CSV with a row per layer."""
    call = build_get("profiles", profile_id, format=format)
    return (yield from send_with_retries(call)).body.decode()


def delete_profile(profile_id: str) -> Steps[None]:
    """Delete a profile.

    Raises:
        Refused: Plans name it.
    """
    yield from delete(build_delete("profiles", profile_id))


def capabilities() -> Steps[Capabilities]:
    """Return what the service accepts: models, devices, formats and limits."""
    return (yield from ask(build_get("capabilities"), Capabilities))


def cluster(devices: str) -> Steps[Cluster]:
    """Return the cluster that shorthand such as ``4x24GB`` stands for."""
    return (yield from ask(build_get("clusters", devices=devices), Cluster))


def projects() -> Steps[ProjectList]:
    """List all projects for the server's own token, and for a key its own."""
    return (yield from ask(build_get("projects"), ProjectList))


def create_project(name: str) -> Steps[Project]:
    """Create a project, with the server's own token; `create_key` makes its first key."""
    return (yield from ask(build_once("projects", fields={"name": name}), Project))


def keys(
    *, limit: int | None = None, cursor: str | None = None, project_id: str | None = None
) -> Steps[KeyList]:
    """List the project's keys without their secrets, newest first, including revoked ones.

    Only the server's own token may name another project, here and below.
    """
    call = build_get("api-keys", limit=limit, cursor=cursor, project_id=project_id)
    return (yield from ask(call, KeyList))


def create_key(
    name: str,
    *,
    scopes: Sequence[str] = ("read", "plan"),
    quotas: Quotas | None = None,
    expires_at: datetime | None = None,
    project_id: str | None = None,
) -> Steps[NewApiKey]:
    """Create a key. Its secret is in this answer and nowhere else.

    If the answer is lost, the request is not repeated; see `keys` for whether it was created.
    """
    expires = None if expires_at is None else expires_at.isoformat()
    fields = drop_none(
        name=name, scopes=list(scopes), quotas=quotas, expires_at=expires, project_id=project_id
    )
    return (yield from ask(build_once("api-keys", fields=fields), NewApiKey))


def revoke_key(key_id: str, *, project_id: str | None = None) -> Steps[ApiKey]:
    """Revoke a key, which takes effect with the next request."""
    return (yield from ask(build_delete("api-keys", key_id, project_id=project_id), ApiKey))
