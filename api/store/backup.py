"""Backup of a database to one file, restorable into SQLite or PostgreSQL.

The file is gzipped JSON lines: a header, one line per row with parents before children, and the
number of rows of each table, without which the file is incomplete. It is written from one
snapshot while servers keep running, and restored into an empty database in one transaction. Only
its owner may read it, because it holds hashes of secrets.

For large PostgreSQL databases its own tools (``pg_dump``, archiving) are faster.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from sqlalchemy import Connection, Table, delete, func, insert, select

from ...core.errors import InvalidInput
from .database import Database, Instant
from .errors import StoreUnavailable
from .migrate import check_revision, upgrade
from .records import DEFAULT_PROJECT
from .tables import METADATA, PROJECTS, REVISION

FORMAT = "stagewright.backup/1"
ROWS_AT_ONCE = 50
"""Rows fetched at once; a row may have megabytes."""


def backup(database: Database, path: Path) -> dict[str, int]:
    """Write a complete file or none; return the number of rows by table.

    Raises:
        InvalidInput: The file cannot be written, or the database does not have this release's
            tables.
        StoreUnavailable: The database does not answer.
    """
    check_revision(database)
    written: Counter[str] = Counter()
    with database.snapshot() as connection, _new_file(path) as file:
        header = {
            "format": FORMAT,
            "revision": REVISION,
            "made_at": database.now().isoformat(),
            "tables": [table.name for table in METADATA.sorted_tables],
        }
        _write_line(file, header)
        for table in METADATA.sorted_tables:  # parents first
            for row in _rows(connection, table):
                _write_line(file, {"table": table.name, "row": row})
                written[table.name] += 1
        _write_line(file, {"rows": dict(written)})
    return dict(written)


def restore(database: Database, path: Path) -> dict[str, int]:
    """Fill an empty database; return the rows by table.

    Raises:
        InvalidInput: The file is no backup, is truncated or from another release, or the
            database is not empty.
        StoreUnavailable: The database does not answer.
    """
    lines = _lines(path)
    _check_header(path, lines)
    upgrade(database)
    with database.write() as connection:
        _clear(connection)
        read = _read_rows(connection, path, lines)
        if database.is_postgresql:
            _continue_sequences(connection)
    return read


def _rows(connection: Connection, table: Table) -> Iterator[dict[str, Any]]:
    in_order = select(table).order_by(*table.primary_key)
    for row in connection.execute(in_order.execution_options(yield_per=ROWS_AT_ONCE)):
        yield {
            name: value.isoformat() if isinstance(value, datetime) else value
            for name, value in row._mapping.items()
        }


def _read_rows(
    connection: Connection, path: Path, lines: Iterator[dict[str, Any]]
) -> dict[str, int]:
    read: Counter[str] = Counter()
    for line in lines:
        if "rows" in line:
            if line["rows"] != dict(read):
                raise InvalidInput(
                    f"{path} is incomplete: it announces {line['rows']} rows and has {dict(read)}"
                )
            return dict(read)
        table = METADATA.tables.get(line.get("table", ""))
        if table is None or not set(line.get("row", {})) <= set(table.columns.keys()):
            raise InvalidInput(f"{path} has a row that fits no table of its revision")
        connection.execute(insert(table).values(**_values(table, line["row"])))
        read[table.name] += 1
    raise InvalidInput(f"{path} is truncated: its last line is missing; use another backup")


def _values(table: Table, row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: datetime.fromisoformat(value)
        if value is not None and isinstance(table.c[name].type, Instant)
        else value
        for name, value in row.items()
    }


def _clear(connection: Connection) -> None:
    """Reject a database that is not empty, and remove the default project of a new one."""
    for table in METADATA.sorted_tables:
        rows = select(func.count()).select_from(table)
        if table is PROJECTS:
            rows = rows.where(PROJECTS.c.id != DEFAULT_PROJECT)
        if num_rows := connection.execute(rows).scalar_one():
            raise InvalidInput(
                f"the database already holds {num_rows} rows of {table.name}; restore into an "
                "empty one"
            )
    connection.execute(delete(PROJECTS))


def _continue_sequences(connection: Connection) -> None:
    """Make PostgreSQL number new rows after the restored ones; SQLite does so by itself."""
    for table in METADATA.sorted_tables:
        if "position" in table.columns:
            last = connection.execute(select(func.max(table.c.position))).scalar()
            if last is not None:
                sequence = func.pg_get_serial_sequence(table.name, "position")
                connection.execute(select(func.setval(sequence, last)))


def _check_header(path: Path, lines: Iterator[dict[str, Any]]) -> None:
    """Check the first line of a backup. Raises: InvalidInput."""
    header = next(lines, {})
    if header.get("format") != FORMAT:
        raise InvalidInput(f"{path} is not a Stagewright backup ({FORMAT})")
    if header.get("revision") != REVISION:
        raise InvalidInput(
            f"{path} is of revision {header.get('revision')}, and this release reads {REVISION} "
            "only; restore it with the release that wrote it"
        )


@contextmanager
def _new_file(path: Path) -> Iterator[TextIO]:
    """Yield a file that appears under its name only once it is complete and on disk."""
    partial = path.with_name(path.name + ".partial")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as raw:
            with gzip.open(raw, "wt", encoding="utf-8", compresslevel=6) as file:
                yield file
            raw.flush()
            os.fsync(raw.fileno())
        partial.replace(path)
    except StoreUnavailable:
        raise
    except OSError as error:
        raise InvalidInput(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        partial.unlink(missing_ok=True)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the parsed lines of a backup. Raises: InvalidInput."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                value = json.loads(line)
                if not isinstance(value, dict):
                    raise InvalidInput(f"{path} is not a Stagewright backup ({FORMAT})")
                yield value
    except EOFError:
        raise InvalidInput(f"{path} is truncated; use another backup") from None
    except (OSError, zlib.error, UnicodeError, json.JSONDecodeError) as error:
        raise InvalidInput(f"cannot read {path}: {error}") from None


def _write_line(file: TextIO, value: dict[str, Any]) -> None:
    file.write(json.dumps(value, separators=(",", ":")) + "\n")
