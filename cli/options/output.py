"""The ``--json`` flag, which every command takes."""

from __future__ import annotations

from typing import Annotated

from typer import Option

JsonFlag = Annotated[bool, Option("--json", help="Print one JSON document to stdout.")]
