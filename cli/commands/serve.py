"""``stagewright serve``: serve planning over HTTP."""

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
        int | None,
        Option(
            min=0, max=65535, help="Port to listen on; 0 picks a free one.", show_default="8000"
        ),
    ] = None,
    database: Annotated[
        str | None,
        Option(
            help="Database for plans and profiles: an SQLite file, or postgresql://user@host/name. "
            "Pass a URL with a password in STAGEWRIGHT_DATABASE instead.",
            show_default="stagewright.db",
        ),
    ] = None,
    token: Annotated[
        str | None,
        Option(
            help="Bearer token that requests must carry. Prefer STAGEWRIGHT_TOKEN, which other "
            "users of the machine cannot see. On a loopback address, default: a random token."
        ),
    ] = None,
    config: Annotated[
        Path | None,
        Option(help="Settings file, in TOML; see 'stagewright config show'."),
    ] = None,
    scheduler: Annotated[
        str | None,
        Option(
            help="Where measurements run: 'embedded', or a Dask scheduler with its own workers, "
            "tls://HOST:8786 (see docs/service/jobs.md).",
            show_default="embedded",
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Serve planning over HTTP until interrupted.

    Every setting also has an environment variable, e.g. STAGEWRIGHT_PORT. The first line on
    stdout is JSON with the address and the token, with or without --json.
    """
    from ...api.server import serve

    serve(
        host=host, port=port, database=database, token=token, config=config,
        scheduler=scheduler,
    )  # fmt: skip
