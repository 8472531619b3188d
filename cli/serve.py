"""``stagewright serve``: plan over HTTP."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from .output import say


def command(
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on.")] = 8000,
    database: Annotated[str, Option(help="File that keeps plans and profiles.")] = "stagewright.db",
    token: Annotated[
        str | None,
        Option(
            envvar="STAGEWRIGHT_TOKEN",
            help="Bearer token that requests must carry; needed on any but a loopback address.",
        ),
    ] = None,
) -> None:
    """Serve planning over HTTP."""
    from ..api.serve import serve

    say(f"next: open http://{host}:{port}/docs, or see POST /v1/plans in the README")
    serve(host=host, port=port, database=database, token=token)
