"""``stagewright explain``: why a plan takes as long as it does, and what would help."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from ..support.flag_names import flags_of
from ..support.next_steps import after_plan, command_line
from ..support.output import JsonFlag, emit, say_next
from ..support.read_documents import read_devices, read_document

if TYPE_CHECKING:
    from ...core.plan.explanation import Explanation
    from ...core.plan.plan import Plan

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
    from ...core.plan.plan import Plan
    from ...core.profile.profile import Profile

    made, costs = read_document(plan, Plan), read_document(profile, Profile)
    cluster = read_devices(devices)
    from ...planner.explain import explain

    found = explain(made, costs, cluster, deadline_s=deadline)
    emit(found.model_dump_json(indent=2) if as_json else str(found))
    say_next(_next(found, made, plan, profile, devices), quiet=as_json)


def _next(found: Explanation, plan: Plan, file: Path, profile: Path, devices: str) -> str:
    """Plan again with the change of options that buys most, if one is worth it."""
    changes: dict[str, dict[str, object]] = {
        "twice the micro-batches": {"num_microbatches": 2 * found.num_microbatches},
        "recomputation allowed": {"recompute": "auto"},
        "replicas allowed": {"max_replicas": None},
    }
    able = [entry for entry in found.alternatives if entry.text in changes]
    best = max(able, key=lambda entry: entry.gain or 0.0, default=None)
    if best is None or (best.gain or 0.0) < WORTH_IT:
        return after_plan(plan, file)
    changed = plan.options.model_copy(update=changes[best.text])
    if plan.options.batch_size is not None and "num_microbatches" in changes[best.text]:
        changed = changed.model_copy(update={"batch_size": 2 * plan.options.batch_size})
    return command_line("plan", profile, "-d", devices, *flags_of(changed))
