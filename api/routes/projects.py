"""``/v1/projects``: owners of plans, profiles, graphs, jobs and keys."""

from __future__ import annotations

from typing import Annotated

from fastapi import Body, Response

from ...core.document import Record
from ...core.service.documents import Title
from ...core.service.keys import Project, ProjectList
from ..auth.access import PROJECTS, CurrentPrincipal
from ..http.examples import PROJECT_EXAMPLES
from .dependencies import TheStore, strict_router

router = strict_router(PROJECTS, "keys")


class ProjectRequest(Record):
    """A request for a new project, by a name that no other has."""

    name: Title


@router.post("", status_code=201)
def create_project(
    store: TheStore,
    request: Annotated[ProjectRequest, Body(openapi_examples=PROJECT_EXAMPLES)],
    response: Response,
    principal: CurrentPrincipal,
) -> Project:
    """Create a project, with the server's own token; create its first key with `project_id`."""
    principal.require_operator("creating a project")
    made = store.projects.create(request.name)
    response.headers["Location"] = PROJECTS
    return made


@router.get("")
def list_projects(store: TheStore, principal: CurrentPrincipal) -> ProjectList:
    """List all projects for the server's own token, and for a key the one that it belongs to."""
    if principal.is_operator:
        return ProjectList(projects=tuple(store.projects.list()))
    return ProjectList(projects=(store.projects.get(principal.project_id),))
