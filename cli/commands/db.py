"""``stagewright db``: maintain a service's database."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from ...core.errors import InvalidInput, StagewrightError
from ...core.units import count
from ..options.service import ConfigFlag, DatabaseFlag, find_database
from ..support.next_steps import command_line
from ..support.output import JsonFlag, check_writable, emit, say_next

if TYPE_CHECKING:
    from ...api.store.database import Database


Action = Literal["check", "upgrade", "backup", "restore", "prune"]
DaysOption = Annotated[float | None, Option(min=0, rich_help_panel="For prune")]


def command(
    action: Annotated[Action, Argument(metavar="ACTION", help="What to do, as described above.")],
    file: Annotated[
        Path | None, Argument(metavar="FILE", help="For backup and restore: the backup file.")
    ] = None,
    database: DatabaseFlag = None,
    config: ConfigFlag = None,
    jobs_days: DaysOption = None,
    audit_days: DaysOption = None,
    plans_days: DaysOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Maintain the database of a service; all actions but restore work while it is running.

    check reads all data and reports faults. upgrade creates the tables of an empty database,
    as a server does at startup. backup writes everything to FILE; restore loads FILE into an empty
    SQLite or PostgreSQL database, whichever kind it came from. prune deletes data older than the
    given number of days: finished jobs (--jobs-days), audit log entries (--audit-days), and plans
    with their profiles and graphs (--plans-days); the rest is kept.
    """
    _check_arguments(action, file, (jobs_days, audit_days, plans_days))
    from ...api.store.database import Database, utc_now

    must_exist = action not in ("upgrade", "restore")
    address = find_database(database, config, must_exist=must_exist)
    with closing(Database(address, now=utc_now)) as opened:
        if action == "check":
            _check(opened, as_json=as_json)
        elif action == "upgrade":
            _upgrade(opened, as_json=as_json)
        elif action == "prune":
            _prune(opened, jobs_days, audit_days, plans_days, as_json=as_json)
        elif action == "backup":
            _backup(opened, file or Path(), as_json=as_json)
        else:
            _restore(opened, file or Path(), as_json=as_json)


def _check_arguments(action: Action, file: Path | None, days: tuple[float | None, ...]) -> None:
    if action in ("backup", "restore"):
        if file is None:
            raise InvalidInput(f"missing file: stagewright db {action} FILE")
    elif file is not None:
        raise InvalidInput(f"{action} takes no FILE; name the database with --database")
    if (action == "prune") != any(value is not None for value in days):
        raise InvalidInput(
            "prune requires at least one of --jobs-days, --audit-days and --plans-days; no other "
            "action accepts them"
        )


def _check(database: Database, *, as_json: bool) -> None:
    from ...api.store.maintenance import find_faults

    faults = find_faults(database)
    data = {"database": database.name, "faults": faults}
    emit(
        json.dumps(data) if as_json else "\n".join(faults or [f"{database.name}: no faults found"])
    )
    if faults:
        raise StagewrightError(
            f"{count(len(faults), 'fault')} in {database.name}; stop the server and restore a "
            "backup into a new database"
        )


def _upgrade(database: Database, *, as_json: bool) -> None:
    from ...api.store.migrate import upgrade
    from ...api.store.tables import REVISION

    before = upgrade(database)
    data = {"database": database.name, "revision_before": before, "revision": REVISION}
    change = f"{REVISION}, up to date" if before else f"empty -> {REVISION}"
    emit(json.dumps(data) if as_json else f"{database.name}: revision {change}")


def _backup(database: Database, file: Path, *, as_json: bool) -> None:
    from ...api.store.backup import backup

    check_writable(file)
    rows = backup(database, file)
    data = {"file": str(file), "size_bytes": file.stat().st_size, "rows": rows}
    emit(json.dumps(data) if as_json else f"{file}: {_format_counts(rows)} from {database.name}")
    say_next(command_line("db", "restore", file, "--database", "restored.db"), quiet=as_json)


def _restore(database: Database, file: Path, *, as_json: bool) -> None:
    from ...api.store.backup import restore

    rows = restore(database, file)
    data = {"database": database.name, "rows": rows}
    emit(json.dumps(data) if as_json else f"{database.name}: {_format_counts(rows)} from {file}")
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
    from ...api.store.maintenance import expire
    from ...api.store.migrate import check_revision
    from ...api.store.records import Retention

    check_revision(database)
    retention = Retention(jobs_days=jobs_days, audit_days=audit_days, plans_days=plans_days)
    removed = expire(database, retention)
    data = {"database": database.name, "removed": removed}
    emit(json.dumps(data) if as_json else f"{database.name}: removed {_format_counts(removed)}")


def _format_counts(rows: dict[str, int]) -> str:
    return ", ".join(f"{number} {table}" for table, number in rows.items() if number) or "nothing"
