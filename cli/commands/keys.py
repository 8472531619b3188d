"""``stagewright keys``: who may use a service."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from ...api.auth.scopes import MEANING, SCOPES, Scope
from ...core.errors import InvalidInput
from ...core.text_table import format_table
from ..options.database import ConfigFlag, DatabaseFlag, check_exists, database_of, opened_store
from ..support.next_steps import command_line
from ..support.output import JsonFlag, emit, say, say_next

if TYPE_CHECKING:
    from ...api.store.records import ApiKey, NewApiKey, Project, Quotas
    from ...api.store.store import Store

DEFAULT_SCOPES = "read,plan"


class Action(Enum):
    """What to do with keys."""

    CREATE = "create"
    LIST = "list"
    REVOKE = "revoke"


def _scopes_help() -> str:
    return "; ".join(f"{scope}: {MEANING[scope]}" for scope in SCOPES)


def command(
    action: Annotated[Action, Argument(help="What to do; see below.")],
    which: Annotated[
        str | None,
        Argument(metavar="NAME|ID", help="For create: a name for people. For revoke: the id."),
    ] = None,
    scopes: Annotated[
        str,
        Option(
            help=f"What the key may do, with commas. {_scopes_help()}.",
            rich_help_panel="For create",
        ),
    ] = DEFAULT_SCOPES,
    project: Annotated[
        str | None,
        Option(
            help="The project's name or id; projects do not see each other. Without it keys are "
            "made in the project 'default', and those of all projects are listed."
        ),
    ] = None,
    new_project: Annotated[
        bool,
        Option("--new-project", help="Make the project.", rich_help_panel="For create"),
    ] = False,
    expires_days: Annotated[
        float | None,
        Option(min=0.001, max=36500, help="Days until it expires.", rich_help_panel="For create"),
    ] = None,
    requests_per_minute: Annotated[
        int | None, Option(min=1, help="Requests a minute.", rich_help_panel="For create")
    ] = None,
    unfinished_jobs: Annotated[
        int | None,
        Option(min=0, help="Jobs queued or running at once.", rich_help_panel="For create"),
    ] = None,
    database: DatabaseFlag = None,
    config: ConfigFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Make, list and revoke the keys of a service; it may be running.

    create prints the key's secret on stdout, this once: the database keeps a hash. Clients send
    it as 'Authorization: Bearer SECRET'. revoke lets a key open nothing from the next request on.
    """
    if (action is Action.LIST) != (which is None):
        raise InvalidInput(
            "create takes the new key's name, revoke a key's id, and list neither: "
            "stagewright keys create NAME, keys revoke ID, keys list"
        )
    address = database_of(database, config)
    if action is not Action.CREATE:
        check_exists(address)
    with opened_store(address) as store:
        if action is Action.CREATE:
            quotas = (requests_per_minute, unfinished_jobs)
            owner = _owner(store, project or "default", make=new_project)
            made = _create(store, owner, which or "", _parsed(scopes), quotas, expires_days)
            _show_made(made, as_json=as_json)
            return
        owners = store.projects.list() if project is None else [_owner(store, project)]
        if action is Action.LIST:
            _list(store, owners, as_json=as_json)
        else:
            _revoke(store, owners, which or "", as_json=as_json)


def _parsed(text: str) -> tuple[Scope, ...]:
    """Scopes out of a list with commas, in the usual order."""
    names = {name.strip() for name in text.split(",") if name.strip()}
    if not names or names - set(SCOPES):
        raise InvalidInput(f"--scopes takes some of {','.join(SCOPES)}, not {text!r}")
    return tuple(scope for scope in SCOPES if scope in names)


def _owner(store: Store, name: str, *, make: bool = False) -> Project:
    """The project of that name or id, made if wanted.

    Raises:
        InvalidInput: There is none, or already one.
    """
    if make:
        return store.projects.create(name)
    for project in store.projects.list():
        if name in (project.name, project.id):
            return project
    raise InvalidInput(
        f"there is no project {name!r}; 'stagewright keys create' makes it with --new-project"
    )


def _create(
    store: Store,
    owner: Project,
    name: str,
    scopes: Sequence[Scope],
    quotas: tuple[int | None, int | None],
    expires_days: float | None,
) -> NewApiKey:
    from ...api.store.records import Quotas
    from ...api.store.store import utc_now

    made = store.keys.create(
        owner.id,
        name=name,
        scopes=scopes,
        quotas=Quotas(max_requests_per_minute=quotas[0], max_unfinished_jobs=quotas[1]),
        expires_at=None if expires_days is None else utc_now() + timedelta(days=expires_days),
    )
    _note(store, "api-keys.create", made.key)
    return made


def _show_made(made: NewApiKey, *, as_json: bool) -> None:
    emit(made.model_dump_json() if as_json else made.secret)
    key = made.key
    say(
        f"key {key.id} ({key.name}) of {key.project_id} may {', '.join(key.scopes)}; "
        "the line above is its secret, which is shown this once",
        quiet=as_json,
    )
    say_next(command_line("keys", "list"), quiet=as_json)


def _list(store: Store, owners: Sequence[Project], *, as_json: bool) -> None:
    found = [(owner, key) for owner in owners for key in store.keys.list(owner.id)]
    if as_json:
        keys = [{**key.model_dump(mode="json"), "project": owner.name} for owner, key in found]
        emit(json.dumps({"keys": keys}))
        return
    headings = ("key", "project", "name", "scopes", "made", "quotas", "state")
    rows = [_row(owner, key) for owner, key in found]
    emit(format_table([headings, *rows]) if rows else "there are no keys")
    say_next(command_line("keys", "create", "NAME"), quiet=as_json)


def _shown(name: str) -> str:
    """A name somebody sent over HTTP, without what a terminal would obey."""
    return "".join(character if character.isprintable() else "?" for character in name)


def _row(owner: Project, key: ApiKey) -> tuple[str, ...]:
    scopes, made = ",".join(key.scopes), f"{key.created_at:%Y-%m-%d %H:%M:%S}"
    return (
        key.id, _shown(owner.name), _shown(key.name), scopes, made, _quotas(key.quotas), _state(key)
    )  # fmt: skip


def _quotas(quotas: Quotas) -> str:
    limits = (
        (quotas.max_requests_per_minute, "requests/min"),
        (quotas.max_unfinished_jobs, "jobs at once"),
    )
    return ", ".join(f"{most} {what}" for most, what in limits if most is not None) or "none"


def _state(key: ApiKey) -> str:
    from ...api.store.store import utc_now

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
            _note(store, "api-keys.delete", key)
            emit(
                key.model_dump_json()
                if as_json
                else f"{key.id} ({_shown(key.name)}) opens nothing now"
            )
            return
    raise InvalidInput(f"there is no key {key_id!r}; 'stagewright keys list' shows them")


def _note(store: Store, action: str, key: ApiKey) -> None:
    """Write what was done into the audit log, as the service does."""
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
