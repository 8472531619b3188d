"""``stagewright audit``: who did what with a service."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

from typer import Option

from ...core.errors import InvalidInput
from ..options.database import ConfigFlag, DatabaseFlag, check_exists, database_of, opened_store
from ..support.next_steps import command_line
from ..support.output import JsonFlag, emit, say_next

if TYPE_CHECKING:
    from ...api.store.records import AuditEntry
    from ...api.store.store import Store


def command(
    limit: Annotated[int, Option(min=1, max=100_000, help="Lines, at most.")] = 50,
    project: Annotated[
        str | None, Option(help="The project's name or id; without it, everything there is.")
    ] = None,
    cursor: Annotated[
        str | None, Option(help="Go on where an earlier call ended; it printed the cursor.")
    ] = None,
    database: DatabaseFlag = None,
    config: ConfigFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Read the audit log of a service, newest first; it may be running.

    A line for everything that was made, changed or revoked, and for what was refused. With
    --project, what belongs to no project (strangers who were refused) is left out.
    """
    address = database_of(database, config)
    check_exists(address)
    with opened_store(address) as store:
        owner = None if project is None else _project_id(store, project)
        page = store.audit.entries(project_id=owner, limit=limit, cursor=cursor)
    if as_json:
        entries = [entry.model_dump(mode="json") for entry in page.items]
        emit(json.dumps({"entries": entries, "next_cursor": page.next_cursor}))
        return
    emit("\n".join(map(_line, page.items)) or "the audit log is empty")
    if page.next_cursor is not None:
        given = [] if project is None else ["--project", project]
        say_next(command_line("audit", *given, "--cursor", page.next_cursor))


def _project_id(store: Store, named: str) -> str:
    projects = store.projects.list()
    for project in projects:
        if named in (project.id, project.name):
            return project.id
    known = ", ".join(project.name for project in projects)
    raise InvalidInput(f"there is no project {named!r}; there are {known}")


def _line(entry: AuditEntry) -> str:
    """When, what, how it ended, to what, who, from where; no more than a terminal may see."""
    details = {"details": json.dumps(entry.details)} if entry.details else {}
    told = {
        "object": entry.object_id,
        "project": entry.project_id,
        "key": entry.key_id,
        "address": entry.address,
        "request": entry.request_id,
        **details,
    }
    words = [f"{name}={value}" for name, value in told.items() if value is not None]
    text = " ".join([f"{entry.created_at:%Y-%m-%dT%H:%M:%SZ}", entry.action, entry.outcome, *words])
    return json.dumps(text, ensure_ascii=False)[1:-1] if not text.isprintable() else text
