"""``stagewright audit``: read a service's audit log."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

from typer import Option

from ...core.errors import InvalidInput
from ..options.service import ConfigFlag, DatabaseFlag, open_store
from ..support.next_steps import command_line
from ..support.output import JsonFlag, emit, say_next

if TYPE_CHECKING:
    from ...api.store.records import AuditEntry
    from ...api.store.store import Store


def command(
    limit: Annotated[int, Option(min=1, max=100_000, help="Maximum number of entries.")] = 50,
    project: Annotated[
        str | None, Option(help="Name or id of a project. Default: all entries.")
    ] = None,
    cursor: Annotated[
        str | None, Option(help="Continue from the cursor that an earlier call printed.")
    ] = None,
    database: DatabaseFlag = None,
    config: ConfigFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Read the audit log of a service, newest entries first; the service may be running.

    The log has one entry for everything created, changed, revoked or refused. With --project,
    entries without a project (such as unauthenticated requests) are left out.
    """
    with open_store(database, config) as store:
        owner = None if project is None else _find_project_id(store, project)
        page = store.audit.entries(project_id=owner, limit=limit, cursor=cursor)
    if as_json:
        entries = [entry.model_dump(mode="json") for entry in page.items]
        emit(json.dumps({"entries": entries, "next_cursor": page.next_cursor}))
        return
    emit("\n".join(map(_format_entry, page.items)) or "the audit log is empty")
    if page.next_cursor is not None:
        given = [] if project is None else ["--project", project]
        say_next(command_line("audit", *given, "--cursor", page.next_cursor))


def _find_project_id(store: Store, named: str) -> str:
    projects = store.projects.list()
    for project in projects:
        if named in (project.id, project.name):
            return project.id
    known = ", ".join(project.name for project in projects)
    raise InvalidInput(f"unknown project {named!r}; existing projects: {known}")


def _format_entry(entry: AuditEntry) -> str:
    details = {"details": json.dumps(entry.details)} if entry.details else {}
    fields = {
        "object": entry.object_id,
        "project": entry.project_id,
        "key": entry.key_id,
        "address": entry.address,
        "request": entry.request_id,
        **details,
    }
    words = [f"{name}={value}" for name, value in fields.items() if value is not None]
    text = " ".join([f"{entry.created_at:%Y-%m-%dT%H:%M:%SZ}", entry.action, entry.outcome, *words])
    # Some values come from clients: escape control characters that a terminal would obey.
    return json.dumps(text, ensure_ascii=False)[1:-1] if not text.isprintable() else text
