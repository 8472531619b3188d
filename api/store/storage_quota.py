"""Size of each project's documents and kept answers, counted as they are stored and deleted."""

from __future__ import annotations

from collections import Counter

from sqlalchemy import ColumnElement, Connection, Table, delete, func, select, update

from .errors import StorageFull
from .tables import ANSWERS, GRAPHS, PLANS, PROFILES, PROJECTS

COUNTED = {
    PROFILES: PROFILES.c.document,
    GRAPHS: GRAPHS.c.document,
    PLANS: PLANS.c.document,
    ANSWERS: ANSWERS.c.answer,
}
"""The texts whose size counts, by table; an answer that is still being made has none."""


def charge(connection: Connection, project_id: str, size: int, limit: int | None = None) -> None:
    """Add the size of a document or answer, in characters, to the size of its project.

    The lock on the project's row comes before that on any counted row: two transactions that take
    both cannot wait for each other.

    Raises:
        StorageFull: The project would have more than ``limit``.
    """
    change = update(PROJECTS).where(PROJECTS.c.id == project_id)
    change = change.values(stored_size=PROJECTS.c.stored_size + size)
    stored = connection.execute(change.returning(PROJECTS.c.stored_size)).scalar()
    if limit is not None and stored is not None and stored > limit:
        raise StorageFull(size, limit, stored - size)


def delete_rows(connection: Connection, table: Table, *conditions: ColumnElement[bool]) -> int:
    """Delete rows of any table; return their number. They no longer count afterwards."""
    doomed = delete(table).where(*conditions)
    if table not in COUNTED:
        return connection.execute(doomed).rowcount
    size = func.coalesce(func.length(COUNTED[table]), 0).label("size")
    rows = connection.execute(doomed.returning(table.c.project_id, size)).all()
    freed: Counter[str] = Counter()
    for row in rows:
        freed[row.project_id] += row.size
    for project_id in sorted(freed):
        charge(connection, project_id, -freed[project_id])
    return len(rows)


def lock_projects(connection: Connection, *conditions: ColumnElement[bool]) -> None:
    """Take the locks on projects before those on their counted rows; see `charge`."""
    rows = select(PROJECTS.c.id).where(*conditions).order_by(PROJECTS.c.id)
    connection.execute(rows.with_for_update(key_share=True)).all()
