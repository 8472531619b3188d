"""Secrets in files: the token, the session key, the database's password."""

from __future__ import annotations

from pathlib import Path

from ...core.errors import InvalidInput

MAX_BYTES = 64 * 2**10
"""Longest secret read, so that a wrong path cannot fill the memory."""


def read_secret(path: Path) -> str:
    """Return the one line of a file, without the line end that editors add.

    Raises:
        InvalidInput: It cannot be read, is empty, or has more than one line.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1).decode().removesuffix("\n").removesuffix("\r")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise InvalidInput(f"cannot read the secret in {path}: {why}") from None
    if not text or "\n" in text or len(text) > MAX_BYTES:
        raise InvalidInput(f"{path} has to contain one secret on one line")
    return text


def with_password(address: str, path: Path) -> str:
    """Return a database's URL with the password from a file.

    Raises:
        InvalidInput: The address is not a URL, already has a password, or the file is unusable.
    """
    if not is_url(address):
        raise InvalidInput(
            "database_password_file needs a database of the form postgresql://user@host:port/name"
        )
    if has_password(address):
        raise InvalidInput("The database's URL already has a password. Leave out one of the two.")
    from ..store.database import POSTGRESQL, database_url

    url = database_url(address).set(drivername=POSTGRESQL, password=read_secret(path))
    return url.render_as_string(hide_password=False)


def is_url(address: str) -> bool:
    """Return True for a database's URL, False for the path of a SQLite file."""
    return "://" in address


def has_password(address: str) -> bool:
    """Return True if a database's URL contains a password."""
    # Imported here: SQLAlchemy takes long to import, and most commands have no such URL.
    from ..store.database import database_url

    return database_url(address).password is not None
