"""``stagewright serve``: plan over HTTP."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from .output import JsonFlag


def command(
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    database: Annotated[
        str,
        Option(
            envvar="STAGEWRIGHT_DATABASE",
            help="What keeps plans and profiles: an SQLite file, or postgresql://user@host/name.",
        ),
    ] = "stagewright.db",
    token: Annotated[
        str | None,
        Option(
            help="Bearer token that requests carry. Better given in STAGEWRIGHT_TOKEN, which "
            "other users of the machine cannot see; on a loopback address one is made up."
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Serve planning over HTTP until interrupted.

    The first line on stdout is JSON with the address and the token, with or without --json.
    """
    from ..api.serve import serve

    serve(host=host, port=port, database=database, token=token)
