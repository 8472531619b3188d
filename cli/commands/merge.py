"""``stagewright merge``: merge profiles of several micro-batch sizes or repeated runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from ..support.output import JsonFlag, check_writable, finish_profile
from ..support.read_documents import read_document


def command(
    files: Annotated[
        list[Path],
        Argument(
            metavar="PROFILE",
            help="Profiles of one model with equal settings; micro-batch sizes may differ.",
        ),
    ],
    microbatch: Annotated[
        int | None,
        Option(min=1, help="Micro-batch size of the merged profile; required if the sizes differ."),
    ] = None,
    output: Annotated[
        Path, Option("--output", "-o", help="Write the merged profile to this file.")
    ] = Path("merged.json"),
    as_json: JsonFlag = False,
) -> None:
    """Merge several profiles of one model into one, at any micro-batch size.

    Profiles of the same size are pooled by the median of their medians. Between measured sizes,
    times and bytes are interpolated; beyond them they are extrapolated and marked as such.
    Profiles of different models, devices or settings are refused.
    """
    from ...core.profile.merge import merge
    from ...core.profile.profile import Profile

    check_writable(output)
    profiles = [read_document(file, Profile) for file in files]
    profile = merge(profiles, samples=microbatch, names=[str(file) for file in files])
    finish_profile(profile, output, as_json=as_json)
