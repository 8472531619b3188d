"""Flags that send a command's work to a service, or select a service's database."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from ...core.errors import InvalidInput

if TYPE_CHECKING:
    from ...api.store.store import Store

SERVICE = "Using a service"

Server = Annotated[
    str | None,
    Option(
        metavar="URL",
        help="Run this on a service, e.g. http://127.0.0.1:8000.",
        rich_help_panel=SERVICE,
    ),
]
Token = Annotated[
    str | None,
    Option(
        help="The service's token or an API key. Prefer STAGEWRIGHT_TOKEN, which other users of "
        "the machine cannot see.",
        rich_help_panel=SERVICE,
    ),
]


def check_token(server: str | None, token: str | None) -> None:
    """Raise `InvalidInput` if a token was given without a server to send it to."""
    if token is not None and server is None:
        raise InvalidInput("--token requires --server")


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


def find_database(given: str | None, config: Path | None = None, *, must_exist: bool = True) -> str:
    """Return the database given, or else the one a server started here would use.

    An SQLite file that ``must_exist`` is refused if it does not: opening it would create one.
    """
    from ...api.settings.load import configure

    # Not strict: trouble with settings that have nothing to do with the database is no
    # reason to keep an operator from backing it up.
    found = configure({"database": given}, file=config, strict=False)
    if trouble := found.troubles.get("database_password_file"):
        raise InvalidInput(trouble)
    database = found.settings.database
    if must_exist and "://" not in database and not Path(database).is_file():
        raise InvalidInput(f"database {database} does not exist; name one with --database")
    return database


def open_store(
    given: str | None, config: Path | None, *, must_exist: bool = True
) -> closing[Store]:
    """Open the store in the database found, for a ``with`` block."""
    from ...api.store.store import Store

    return closing(Store(find_database(given, config, must_exist=must_exist)))
