"""``stagewright export``: write a plan for another runtime, or a profile as rows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from ...core.errors import InvalidInput
from ...formats.target_tables import TARGET_NAMES
from ..support.next_steps import command_line
from ..support.output import JsonFlag, check_folder, check_writable, emit, say, say_next, write_file
from ..support.read_documents import read_document

if TYPE_CHECKING:
    from ...core.plan.plan import Plan
    from ...core.profile.profile import Profile
    from ...formats.target import Export

CSV = "csv"


def command(
    file: Annotated[Path, Argument(metavar="PLAN|PROFILE", help="A plan or a profile.")],
    to: Annotated[
        str | None,
        Option(
            help=f"Runtime to write a plan for: {', '.join(TARGET_NAMES)}. Profiles are written as "
            "csv.",
            metavar="TARGET",
        ),
    ] = None,
    output: Annotated[
        str | None,
        Option(
            "--output",
            "-o",
            metavar="PATH",
            help="Write to this file, or into this folder, which a / at the end creates.",
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Write a plan in the form of another runtime, or a profile as CSV.

    What the runtime cannot express is refused, each with the option that avoids it; 'stagewright
    plan --for TARGET' plans under its rules. A profile becomes one row per layer, with units in
    the column names. With --json, a plan's files are an object by name, and a profile's rows a
    list of objects.
    """
    from ...core.plan.plan import Plan
    from ...core.profile.profile import Profile

    document = read_document(file, Plan, Profile)
    if isinstance(document, Profile):
        if to not in (None, CSV):
            raise InvalidInput(f"{file} is a profile, which is exported to csv; plan it first")
        _write_profile(document, _find_path(output, f"{file.stem}.csv"), as_json=as_json)
        say_next(command_line("show", file), quiet=as_json)
        return
    assert isinstance(document, Plan), "one of the two kinds asked for"
    _write_plan(document, to, output, as_json=as_json)


def _find_path(output: str | None, name: str) -> Path | None:
    """Return the file to write: ``name`` in a folder, which a name that ends in / creates."""
    if output is None:
        return None
    path = Path(output)
    if output.endswith(os.sep):
        check_folder(path)
    path = path / name if path.is_dir() else path
    check_writable(path)
    return path


def _write_profile(profile: Profile, output: Path | None, *, as_json: bool) -> None:
    from ...formats.profile_csv import profile_csv, profile_rows

    text = json.dumps(profile_rows(profile), indent=2) if as_json else profile_csv(profile)
    if output is None:
        emit(text.rstrip("\r\n"))
    else:
        write_file(output, text if text.endswith("\n") else text + "\n")
        say(f"wrote {output}", quiet=as_json)


def _write_plan(plan: Plan, to: str | None, output: str | None, *, as_json: bool) -> None:
    from ...formats.runtimes.registry import TARGETS, export, find_target

    if to is None:
        raise InvalidInput(f"name a runtime for the plan with --to: {', '.join(TARGETS)}")
    exported, name = export(plan, to), find_target(to).file_name
    path = _find_path(output, name)
    if path is not None:
        exported, name = exported.name_after(path.stem), path.name
        files = {path: exported.text}
        files |= {path.parent / each: text for each, text in exported.attachments.items()}
        for each in files:
            check_writable(each)
        for each, text in files.items():
            write_file(each, text)
        say(f"wrote {', '.join(map(str, files))}", quiet=as_json)
    if as_json:
        emit(json.dumps({name: exported.text, **exported.attachments}, indent=2))
    elif path is None:
        emit(exported.text.rstrip("\n"))
        _say_attachments(exported, name)


def _say_attachments(exported: Export, name: str) -> None:
    if exported.attachments:
        named = exported.name_after(Path(name).stem).attachments
        say(f"-o {name} also writes {', '.join(named)} beside it")
