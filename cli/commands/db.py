"""``stagewright db``: look after a service's database."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from ...core.errors import InvalidInput, StagewrightError
from ...core.units import count
from ..options.database import ConfigFlag, DatabaseFlag, check_exists, database_of
from ..support.next_steps import command_line
from ..support.output import JsonFlag, check_writable, emit, say_next

if TYPE_CHECKING:
    from ...api.store.database import Database


class Action(Enum):
    """What to do with a database."""

    CHECK = "check"
    UPGRADE = "upgrade"
    BACKUP = "backup"
    RESTORE = "restore"
    PRUNE = "prune"


DaysOption = Annotated[float | None, Option(min=0, rich_help_panel="For prune")]


def command(
    action: Annotated[Action, Argument(help="What to do; see below.")],
    file: Annotated[
        Path | None, Argument(metavar="FILE", help="For backup and restore: the backup.")
    ] = None,
    database: DatabaseFlag = None,
    config: ConfigFlag = None,
    jobs_days: DaysOption = None,
    audit_days: DaysOption = None,
    plans_days: DaysOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Look after the database of a service; all but restore may be done while it serves.

    check reads everything and says what is wrong. upgrade makes the tables of this release, as
    a server does when it starts. backup writes all of it to FILE; restore reads FILE into an
    empty database, of SQLite or PostgreSQL whichever it came from. prune removes what is older
    than so many days: finished jobs (--jobs-days), lines of the audit log (--audit-days), plans
    with their profiles and graphs (--plans-days); what is not given is kept.
    """
    _check_words(action, file, (jobs_days, audit_days, plans_days))
    address = database_of(database, config)
    if action not in (Action.UPGRADE, Action.RESTORE):
        check_exists(address)
    with _opened(address) as opened:
        if action is Action.CHECK:
            _check(opened, as_json=as_json)
        elif action is Action.UPGRADE:
            _upgrade(opened, as_json=as_json)
        elif action is Action.PRUNE:
            _prune(opened, jobs_days, audit_days, plans_days, as_json=as_json)
        elif action is Action.BACKUP:
            _backup(opened, file or Path(), as_json=as_json)
        else:
            _restore(opened, file or Path(), as_json=as_json)


def _check_words(action: Action, file: Path | None, days: tuple[float | None, ...]) -> None:
    """Refuse words that do not belong together."""
    if action in (Action.BACKUP, Action.RESTORE):
        if file is None:
            raise InvalidInput(f"say which file: stagewright db {action.value} FILE")
    elif file is not None:
        raise InvalidInput(f"{action.value} takes no FILE; name the database with --database")
    if (action is Action.PRUNE) != any(value is not None for value in days):
        raise InvalidInput(
            "prune removes what is older than --jobs-days, --audit-days or --plans-days; "
            "give one of them, to prune only"
        )


@contextmanager
def _opened(address: str) -> Iterator[Database]:
    from ...api.store.database import Database
    from ...api.store.store import utc_now

    database = Database(address, now=utc_now)
    try:
        yield database
    finally:
        database.close()


def _check(database: Database, *, as_json: bool) -> None:
    from ...api.store.integrity import find_faults

    faults = find_faults(database)
    data = {"database": database.name, "faults": faults}
    emit(json.dumps(data) if as_json else "\n".join(faults or [f"{database.name} is sound"]))
    if faults:
        raise StagewrightError(
            f"{count(len(faults), 'fault')} in {database.name}; stop the server and restore a "
            "backup into a new database"
        )


def _upgrade(database: Database, *, as_json: bool) -> None:
    from ...api.store.migrate import upgrade

    before, after = upgrade(database)
    data = {"database": database.name, "revision_before": before, "revision": after}
    words = (
        "has this release's tables already"
        if before == after
        else f"went from {'nothing' if before is None else 'revision ' + before} to {after}"
    )
    emit(json.dumps(data) if as_json else f"{database.name} {words}")


def _backup(database: Database, file: Path, *, as_json: bool) -> None:
    from ...api.store.backup import backup

    check_writable(file)
    rows = backup(database, file)
    data = {"file": str(file), "size_bytes": file.stat().st_size, "rows": rows}
    emit(json.dumps(data) if as_json else f"{file}: {_in_words(rows)} of {database.name}")
    again = command_line("db", "restore", file, "--database", "restored.db")
    say_next(again, quiet=as_json)


def _restore(database: Database, file: Path, *, as_json: bool) -> None:
    from ...api.store.backup import restore

    rows = restore(database, file)
    data = {"database": database.name, "rows": rows}
    emit(json.dumps(data) if as_json else f"{database.name}: {_in_words(rows)} of {file}")
    where = () if database.is_postgresql else ("--database", database.name)
    say_next(command_line("db", "check", *where), quiet=as_json)


def _prune(
    database: Database,
    jobs_days: float | None,
    audit_days: float | None,
    plans_days: float | None,
    *,
    as_json: bool,
) -> None:
    from ...api.store.migrate import check_revision
    from ...api.store.records import Retention
    from ...api.store.retention import expire

    check_revision(database)
    retention = Retention(jobs_days=jobs_days, audit_days=audit_days, plans_days=plans_days)
    removed = expire(database, retention)
    data = {"database": database.name, "removed": removed}
    emit(json.dumps(data) if as_json else f"{database.name}: removed {_in_words(removed)}")


def _in_words(rows: dict[str, int]) -> str:
    """Numbers of rows by table."""
    return ", ".join(f"{number} {table}" for table, number in rows.items() if number) or "nothing"
