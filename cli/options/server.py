"""Asking a service instead of doing it here: the flags, and who asks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from typer import Option

from ...core.errors import InvalidInput
from ..support.output import say

if TYPE_CHECKING:
    from ...client.sync_client import Client

SERVICE = "On a service"

Server = Annotated[
    str | None,
    Option(
        metavar="URL",
        help="Have a service do it, e.g. http://127.0.0.1:8000.",
        rich_help_panel=SERVICE,
    ),
]
Token = Annotated[
    str | None,
    Option(
        help="The service's token or an API key; better given in STAGEWRIGHT_TOKEN, which other "
        "users of the machine cannot see.",
        rich_help_panel=SERVICE,
    ),
]


def client_of(server: str | None, token: str | None, *, quiet: bool) -> Client:
    """A client of the service; without an address that of ``STAGEWRIGHT_SERVER``.

    Args:
        server: Its address.
        token: Its token.
        quiet: Whether not to say that it is waited for.
    """
    from ...client.sync_client import Client

    return Client(server, token, on_wait=None if quiet else say)


def token_needs_server(server: str | None, token: str | None) -> None:
    """Insist that a token is for somebody.

    Raises:
        InvalidInput: There is no server.
    """
    if token is not None and server is None:
        raise InvalidInput("--token is for a service; name it with --server")
