"""``stagewright diff``: what differs between two profiles."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument

from ..support.next_steps import command_line
from ..support.output import JsonFlag, emit, say_next
from ..support.read_documents import read_document


def command(
    before: Annotated[Path, Argument(metavar="BEFORE", help="A profile.")],
    after: Annotated[Path, Argument(metavar="AFTER", help="Another, to compare with it.")],
    as_json: JsonFlag = False,
) -> None:
    """Compare two profiles layer by layer: of two devices, two commits, two settings.

    A time that differs by more than the larger spread of both (the distance between the
    quartiles) is marked with an asterisk.
    """
    from ...core.profile.diff import diff
    from ...core.profile.profile import Profile
    from .diff_table_tomerge import diff_table

    found = diff(read_document(before, Profile), read_document(after, Profile))
    emit(found.model_dump_json(indent=2) if as_json else diff_table(found))
    say_next(command_line("show", after), quiet=as_json)
