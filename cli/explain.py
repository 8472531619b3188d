"""``stagewright explain``: why a plan takes as long as it does, and what would help."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from .documents import read_devices, read_document
from .output import JsonFlag, emit, say_next

if TYPE_CHECKING:
    from ..core.explanation import Explanation

WORTH_IT = 0.01
"""Gain from which a change is proposed."""


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

    found = explain(made, costs, cluster, deadline_s=deadline)
    emit(found.model_dump_json(indent=2) if as_json else str(found))
    say_next(_next(found, plan, profile, devices), quiet=as_json)


def _next(found: Explanation, plan: Path, profile: Path, devices: str) -> str:
    """The change of options that buys most, if one is worth it."""
    flags = {
        "twice the micro-batches": ["-m", str(2 * found.num_microbatches)],
        "recomputation allowed": ["--recompute", "auto"],
        "replicas allowed": ["--max-replicas", "any"],
    }
    able = [entry for entry in found.alternatives if entry.text in flags]
    best = max(able, key=lambda entry: entry.gain or 0.0, default=None)
    if best is None or (best.gain or 0.0) < WORTH_IT:
        return f"stagewright show {plan} --svg plan.svg"
    words = shlex.join(["plan", str(profile), "-d", devices, *flags[best.text]])
    return f"stagewright {words}, with the plan's other options"
