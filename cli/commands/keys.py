"""``stagewright keys``: create, list and revoke a service's API keys."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from ...api.auth.scopes import MEANING, SCOPES, Scope
from ...core.errors import InvalidInput
from ...core.text_table import format_table
from ..options.service import ConfigFlag, DatabaseFlag, open_store
from ..support.next_steps import command_line
from ..support.output import JsonFlag, emit, say, say_next

if TYPE_CHECKING:
    from ...api.store.records import ApiKey, NewApiKey, Project, Quotas
    from ...api.store.store import Store

CREATE = "For create"
SCOPE_MEANINGS = "; ".join(f"{scope}: {MEANING[scope]}" for scope in SCOPES)


Action = Literal["create", "list", "revoke"]


def command(
    action: Annotated[Action, Argument(metavar="ACTION", help="What to do, as described above.")],
    name_or_id: Annotated[
        str | None,
        Argument(metavar="NAME|ID", help="For create: a descriptive name. For revoke: the id."),
    ] = None,
    scopes: Annotated[
        str,
        Option(
            help=f"Permissions of the key, comma-separated. {SCOPE_MEANINGS}.",
            rich_help_panel=CREATE,
        ),
    ] = "read,plan",
    project: Annotated[
        str | None,
        Option(
            help="Name or id of the project; projects are isolated from each other. Default: "
            "'default' for create, all projects for list and revoke."
        ),
    ] = None,
    new_project: Annotated[
        bool, Option("--new-project", help="Create the project.", rich_help_panel=CREATE)
    ] = False,
    expires_days: Annotated[
        float | None,
        Option(min=0.001, max=36500, help="Days until the key expires.", rich_help_panel=CREATE),
    ] = None,
    requests_per_minute: Annotated[
        int | None, Option(min=1, help="Maximum requests per minute.", rich_help_panel=CREATE)
    ] = None,
    unfinished_jobs: Annotated[
        int | None,
        Option(min=0, help="Maximum jobs queued or running at once.", rich_help_panel=CREATE),
    ] = None,
    database: DatabaseFlag = None,
    config: ConfigFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Create, list and revoke the API keys of a service; the service may be running.

    create prints the key's secret to stdout, once: the database stores only a hash. Clients send
    it as 'Authorization: Bearer SECRET'. revoke takes effect with the next request.
    """
    if (action == "list") != (name_or_id is None):
        raise InvalidInput(
            "create requires a name, revoke requires a key's id, and list takes neither: "
            "stagewright keys create NAME, keys revoke ID, keys list"
        )
    with open_store(database, config, must_exist=action != "create") as store:
        if name_or_id is None:
            _list(store, _find_projects(store, project), as_json=as_json)
        elif action == "revoke":
            _revoke(store, _find_projects(store, project), name_or_id, as_json=as_json)
        else:
            owner = _resolve_project(store, project or "default", create=new_project)
            quotas = (requests_per_minute, unfinished_jobs)
            made = _create(store, owner, name_or_id, _parse_scopes(scopes), quotas, expires_days)
            _print_new_key(made, as_json=as_json)


def _parse_scopes(text: str) -> tuple[Scope, ...]:
    """Parse comma-separated scopes; return them in their usual order."""
    names = {name.strip() for name in text.split(",") if name.strip()}
    if not names or names - set(SCOPES):
        raise InvalidInput(f"--scopes takes a subset of {','.join(SCOPES)}, not {text!r}")
    return tuple(scope for scope in SCOPES if scope in names)


def _find_projects(store: Store, name: str | None) -> Sequence[Project]:
    return store.projects.list() if name is None else [_resolve_project(store, name)]


def _resolve_project(store: Store, name: str, *, create: bool = False) -> Project:
    if create:
        return store.projects.create(name)
    for project in store.projects.list():
        if name in (project.name, project.id):
            return project
    raise InvalidInput(
        f"unknown project {name!r}; to create it, use 'stagewright keys create' with --new-project"
    )


def _create(
    store: Store,
    owner: Project,
    name: str,
    scopes: Sequence[Scope],
    quotas: tuple[int | None, int | None],
    expires_days: float | None,
) -> NewApiKey:
    from ...api.store.database import utc_now
    from ...api.store.records import Quotas

    made = store.keys.create(
        owner.id,
        name=name,
        scopes=scopes,
        quotas=Quotas(max_requests_per_minute=quotas[0], max_unfinished_jobs=quotas[1]),
        expires_at=None if expires_days is None else utc_now() + timedelta(days=expires_days),
    )
    _audit(store, "api-keys.create", made.key)
    return made


def _print_new_key(made: NewApiKey, *, as_json: bool) -> None:
    emit(made.model_dump_json() if as_json else made.secret)
    key = made.key
    say(
        f"key {key.id} ({key.name}) in {key.project_id}, scopes {', '.join(key.scopes)}; "
        "the line above is its secret, which is not shown again",
        quiet=as_json,
    )
    say_next(command_line("keys", "list"), quiet=as_json)


def _list(store: Store, owners: Sequence[Project], *, as_json: bool) -> None:
    found = [(owner, key) for owner in owners for key in store.keys.list(owner.id)]
    if as_json:
        keys = [{**key.model_dump(mode="json"), "project": owner.name} for owner, key in found]
        emit(json.dumps({"keys": keys}))
        return
    headings = ("key", "project", "name", "scopes", "created", "quotas", "state")
    rows = [_row(owner, key) for owner, key in found]
    emit(format_table([headings, *rows]) if rows else "no keys")
    say_next(command_line("keys", "create", "NAME"), quiet=as_json)


def _printable(name: str) -> str:
    """Replace the control characters of a name, which a client may have sent over HTTP."""
    return "".join(character if character.isprintable() else "?" for character in name)


def _row(owner: Project, key: ApiKey) -> tuple[str, ...]:
    created = f"{key.created_at:%Y-%m-%d %H:%M:%S}"
    return (
        key.id, _printable(owner.name), _printable(key.name), ",".join(key.scopes),
        created, _quotas(key.quotas), _state(key),
    )  # fmt: skip


def _quotas(quotas: Quotas) -> str:
    limits = (
        (quotas.max_requests_per_minute, "requests/min"),
        (quotas.max_unfinished_jobs, "unfinished jobs"),
    )
    return ", ".join(f"{limit} {what}" for limit, what in limits if limit is not None) or "none"


def _state(key: ApiKey) -> str:
    from ...api.store.database import utc_now

    if key.revoked_at is not None:
        return f"revoked {key.revoked_at:%Y-%m-%d}"
    if key.expires_at is not None:
        word = "expired" if key.expires_at <= utc_now() else "expires"
        return f"{word} {key.expires_at:%Y-%m-%d}"
    return "never used" if key.last_used_at is None else f"used {key.last_used_at:%Y-%m-%d}"


def _revoke(store: Store, owners: Sequence[Project], key_id: str, *, as_json: bool) -> None:
    for owner in owners:
        if any(key.id == key_id for key in store.keys.list(owner.id)):
            key = store.keys.revoke(owner.id, key_id)
            _audit(store, "api-keys.delete", key)
            text = f"revoked {key.id} ({_printable(key.name)})"
            emit(key.model_dump_json() if as_json else text)
            return
    raise InvalidInput(f"unknown key {key_id!r}; see 'stagewright keys list'")


def _audit(store: Store, action: str, key: ApiKey) -> None:
    """Add an entry to the audit log, as the service does for requests."""
    from ...api.store.records import AuditEvent

    store.audit.add(
        AuditEvent(
            action=action,
            outcome="ok",
            project_id=key.project_id,
            object_id=key.id,
            details={"by": "stagewright keys"},
        )
    )
