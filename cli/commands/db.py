"""``stagewright db``: maintain a service's database."""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from ...core.errors import InvalidInput, StagewrightError
from ...core.units import count
from ..options.service import ConfigFlag, DatabaseFlag, find_database
from ..support.output import JsonFlag, emit

if TYPE_CHECKING:
    from ...api.store.database import Database


Action = Literal["check", "upgrade", "prune"]
DaysOption = Annotated[float | None, Option(min=0, rich_help_panel="For prune")]


def command(
    action: Annotated[Action, Argument(metavar="ACTION", help="What to do, as described above.")],
    database: DatabaseFlag = None,
    config: ConfigFlag = None,
    jobs_days: DaysOption = None,
    audit_days: DaysOption = None,
    plans_days: DaysOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Maintain the database of a service, which may be running.

    check reads all data and reports faults. upgrade creates the tables of an empty database,
    as a server does at startup. prune deletes data older than the given number of days: finished
    jobs (--jobs-days), audit log entries (--audit-days), and plans with their profiles and graphs
    (--plans-days); the rest is kept. Backups are sqlite3's or pg_dump's (docs/service/store.md).
    """
    if (action == "prune") != any(each is not None for each in (jobs_days, audit_days, plans_days)):
        raise InvalidInput(
            "prune requires at least one of --jobs-days, --audit-days and --plans-days; no other "
            "action accepts them"
        )
    from ...api.store.database import Database, utc_now

    address = find_database(database, config, must_exist=action != "upgrade")
    with closing(Database(address, now=utc_now)) as opened:
        if action == "check":
            _check(opened, as_json=as_json)
        elif action == "upgrade":
            _upgrade(opened, as_json=as_json)
        else:
            _prune(opened, jobs_days, audit_days, plans_days, as_json=as_json)


def _check(database: Database, *, as_json: bool) -> None:
    from ...api.store.maintenance import find_faults

    faults = find_faults(database)
    data = {"database": database.name, "faults": faults}
    emit(
        json.dumps(data) if as_json else "\n".join(faults or [f"{database.name}: no faults found"])
    )
    if faults:
        found = f"{count(len(faults), 'fault')} in {database.name}"
        raise StagewrightError(f"{found}; start the server with a backup")


def _upgrade(database: Database, *, as_json: bool) -> None:
    from ...api.store.migrate import upgrade
    from ...api.store.tables import REVISION

    before = upgrade(database)
    data = {"database": database.name, "revision_before": before, "revision": REVISION}
    change = f"{REVISION}, up to date" if before else f"empty -> {REVISION}"
    emit(json.dumps(data) if as_json else f"{database.name}: revision {change}")


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
