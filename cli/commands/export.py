"""``stagewright export``: write a profile as CSV or JSON rows for other programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ..support.next_steps import command_line
from ..support.output import JsonFlag, check_writable, emit, say, say_next, write_file
from ..support.read_documents import read_document


def command(
    file: Annotated[Path, Argument(metavar="PROFILE", help="A profile.")],
    output: Annotated[
        Path | None, Option("--output", "-o", help="Write to this file instead of stdout.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write a profile as CSV with one row per layer and units in the column names.

    With --json, write the rows as a list of objects.
    """
    from ...core.profile.profile import Profile
    from ...formats.profile_csv import profile_csv, profile_rows

    check_writable(output)
    profile = read_document(file, Profile)
    text = json.dumps(profile_rows(profile), indent=2) if as_json else profile_csv(profile)
    if output is None:
        emit(text.rstrip("\r\n"))
    else:
        write_file(output, text if text.endswith("\n") else text + "\n")
        say(f"wrote {output}", quiet=as_json)
    say_next(command_line("show", file), quiet=as_json)
