"""``stagewright serve``: plan over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from ..support.output import JsonFlag


def command(
    host: Annotated[
        str | None, Option(help="Address to listen on.", show_default="127.0.0.1")
    ] = None,
    port: Annotated[
        int | None, Option(min=0, max=65535, help="Port; 0 takes a free one.", show_default="8000")
    ] = None,
    database: Annotated[
        str | None,
        Option(
            help="What keeps plans and profiles: an SQLite file, or postgresql://user@host/name. "
            "A URL with a password is better given in STAGEWRIGHT_DATABASE.",
            show_default="stagewright.db",
        ),
    ] = None,
    token: Annotated[
        str | None,
        Option(
            help="Bearer token that requests carry. Better given in STAGEWRIGHT_TOKEN, which "
            "other users of the machine cannot see; on a loopback address one is made up."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        Option(help="Settings file, in TOML; 'stagewright config show' tells what holds."),
    ] = None,
    allow_code: Annotated[
        bool | None,
        Option(
            "--allow-code",
            help="Measure code of keys with the scope 'code', in a sandbox; the server does not "
            "start where it does not hold.",
        ),
    ] = None,
    scheduler: Annotated[
        str | None,
        Option(
            help="What runs measurements: 'embedded', or a Dask scheduler with workers of its own, "
            "tls://HOST:8786; see docs/jobs.md.",
            show_default="embedded",
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Serve planning over HTTP until interrupted.

    Every setting has a variable, too: STAGEWRIGHT_PORT for port. The first line on stdout is
    JSON with the address and the token, with or without --json.
    """
    from ...api.server import serve

    serve(
        host=host,
        port=port,
        database=database,
        token=token,
        config=config,
        scheduler=scheduler,
        allow_code=allow_code,
    )
