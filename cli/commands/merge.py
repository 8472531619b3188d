"""``stagewright merge``: profiles of several micro-batch sizes, or repeated ones, as one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ..support.next_steps import planning
from ..support.output import JsonFlag, check_writable, emit, profile_text, say, say_next, write_file
from ..support.read_documents import read_document


def command(
    files: Annotated[
        list[Path],
        Argument(metavar="PROFILE...", help="Of one model, measured alike but for samples."),
    ],
    microbatch: Annotated[
        int | None,
        Option(min=1, help="Samples of the merged profile; needed if those given differ."),
    ] = None,
    output: Annotated[
        Path, Option("--output", "-o", help="Write the merged profile to this file.")
    ] = Path("merged.json"),
    as_json: JsonFlag = False,
) -> None:
    """Make one profile out of several of a model, at any micro-batch size.

    Profiles of the same size are pooled: medians of their medians. At a size between those
    measured, times and bytes are interpolated; beyond them they are extrapolated, and say so.
    Profiles of other models, devices or settings are refused.
    """
    from ...core.profile.merge import merge
    from ...core.profile.profile import Profile

    check_writable(output)
    profiles = [read_document(file, Profile) for file in files]
    profile = merge(profiles, samples=microbatch, names=[str(file) for file in files])
    document = profile.to_json(indent=2)
    write_file(output, document + "\n")
    emit(document if as_json else profile_text(profile))
    say(f"wrote {output}", quiet=as_json)
    say_next(planning(profile, output), quiet=as_json)
