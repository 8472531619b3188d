"""Which database the commands work on that look after a service."""

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
        help="The service's: an SQLite file, or postgresql://user@host/name. Without it, what "
        "STAGEWRIGHT_DATABASE or the settings file says, as for the server. "
        "A URL with a password is better not given here, where others on the machine see it.",
        show_default="stagewright.db",
    ),
]

ConfigFlag = Annotated[
    Path | None,
    Option("--config", help="The server's settings file, in TOML (also STAGEWRIGHT_CONFIG)."),
]


def database_of(given: str | None, config: Path | None = None) -> str:
    """The address of the database: what was given, else what a server here would take.

    Raises:
        InvalidInput: The settings do not fit, or its password cannot be had.
    """
    from ...api.settings.load import configure

    found = configure({"database": given}, file=config, strict=False)
    if trouble := found.troubles.get("database_password_file"):
        raise InvalidInput(trouble)
    return found.settings.database


def check_exists(database: str) -> None:
    """Refuse an SQLite file that is missing: opening it would make one.

    Raises:
        InvalidInput: It is.
    """
    if "://" not in database and not Path(database).is_file():
        raise InvalidInput(f"there is no database {database}; name one with --database")


@contextmanager
def opened_store(database: str) -> Iterator[Store]:
    """The store of a database, closed at the end of the block."""
    from ...api.store.store import Store

    store = Store(database)
    try:
        yield store
    finally:
        store.close()
