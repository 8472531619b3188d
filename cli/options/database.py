"""Flags that select a service's database, and the database they select."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from ...core.errors import InvalidInput

if TYPE_CHECKING:
    from ...api.store.store import Store

DatabaseFlag = Annotated[
    str | None,
    Option(
        help="The service's database: an SQLite file, or postgresql://user@host/name. By default, "
        "as for the server, taken from STAGEWRIGHT_DATABASE or the settings file. Do not pass a "
        "URL with a password here: other users of the machine could see it.",
        show_default="stagewright.db",
    ),
]

ConfigFlag = Annotated[
    Path | None,
    Option("--config", help="The server's settings file, in TOML (also STAGEWRIGHT_CONFIG)."),
]


def resolve_database(given: str | None, config: Path | None = None) -> str:
    """Return the database given, or else the one a server started here would use."""
    from ...api.settings.load import configure

    # Not strict: trouble with settings that have nothing to do with the database is no
    # reason to keep an operator from backing it up.
    found = configure({"database": given}, file=config, strict=False)
    if trouble := found.troubles.get("database_password_file"):
        raise InvalidInput(trouble)
    return found.settings.database


def require_database(database: str) -> None:
    """Raise `InvalidInput` if an SQLite file does not exist: opening it would create one."""
    if "://" not in database and not Path(database).is_file():
        raise InvalidInput(f"database {database} does not exist; name one with --database")


@contextmanager
def open_store(database: str) -> Iterator[Store]:
    """Open a database's store and close it at the end of the block."""
    from ...api.store.store import Store

    store = Store(database)
    try:
        yield store
    finally:
        store.close()
