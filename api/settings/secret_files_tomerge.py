"""Secrets in files of their own, as container platforms hand them over."""

from __future__ import annotations

from pathlib import Path

from ...core.errors import InvalidInput

MAX_BYTES = 64 * 2**10


def read_secret(path: Path) -> str:
    """The text of a file, without the line end that editors add.

    Raises:
        InvalidInput: It cannot be read, is empty, or is no text of a line.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1).decode().removesuffix("\n").removesuffix("\r")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise InvalidInput(f"cannot read the secret in {path}: {why}") from None
    if not text or "\n" in text or len(text) > MAX_BYTES:
        raise InvalidInput(f"{path} has to hold one secret on one line")
    return text


def with_password(address: str, path: Path) -> str:
    """The address of a database, with the password that a file holds.

    Raises:
        InvalidInput: The address is no URL, has a password already, or the file is no good.
    """
    if "://" not in address:
        raise InvalidInput(
            "a database_password_file goes with a database of the kind "
            "postgresql://user@host:port/name"
        )
    from ..store.database import POSTGRESQL, database_url

    url = database_url(address)
    if url.password is not None:
        raise InvalidInput("the database's URL has a password already; leave one of the two out")
    whole = url.set(drivername=POSTGRESQL, password=read_secret(path))
    return whole.render_as_string(hide_password=False)
