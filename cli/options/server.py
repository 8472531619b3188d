"""Flags that send a command's work to a service."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from ...core.errors import InvalidInput

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
