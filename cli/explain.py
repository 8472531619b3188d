"""``stagewright explain``: why a plan takes as long as it does, and what would help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from .documents import read_devices, read_document
from .output import JsonFlag, emit


def command(
    plan: Annotated[Path, Argument(metavar="PLAN", help="Written by 'stagewright plan -o'.")],
    profile: Annotated[Path, Argument(metavar="PROFILE", help="What it was planned from.")],
    devices: Annotated[
        str, Option("--devices", "-d", help="What it was planned for: 4x24GB, or a cluster file.")
    ],
    deadline: Annotated[
        float | None, Option(help="Seconds for all comparisons together.", min=0.0)
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Say what bounds a plan's step, what changes would buy, and what others would do."""
    from ..core.plan import Plan
    from ..core.profile import Profile

    made, costs = read_document(plan, Plan), read_document(profile, Profile)
    cluster = read_devices(devices)
    from ..planner.explain import explain
    from ..planner.validate import validate

    validate(made, costs, cluster)
    found = explain(made, costs, cluster, deadline_s=deadline)
    emit(found.model_dump_json(indent=2) if as_json else str(found))
