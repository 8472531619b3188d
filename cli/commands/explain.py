"""``stagewright explain``: what bounds a plan, and which changes would speed it up."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from ...view.option_flags import flags_of
from ..support.next_steps import command_line, suggest_after_plan
from ..support.output import JsonFlag, emit, say_next
from ..support.progress import working
from ..support.read_documents import read_devices, read_document

if TYPE_CHECKING:
    from ...core.plan.explanation import Explanation
    from ...core.plan.plan import Plan

MIN_GAIN = 0.01
"""Smallest relative gain for which a change of options is suggested."""


def command(
    plan: Annotated[
        Path, Argument(metavar="PLAN", help="A file written by 'stagewright plan -o'.")
    ],
    profile: Annotated[
        Path, Argument(metavar="PROFILE", help="The profile the plan was made from.")
    ],
    devices: Annotated[
        str, Option("--devices", "-d", help="Devices of the plan: 4x24GB, or a cluster file.")
    ],
    deadline: Annotated[
        float | None, Option(help="Time limit in seconds for all comparisons.", min=0.0)
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Explain what bounds a plan's step, what changes would gain, and what other methods find."""
    from ...core.plan.plan import Plan
    from ...core.profile.forward_only import match_profile
    from ...core.profile.profile import Profile

    made, given = read_document(plan, Plan), read_document(profile, Profile)
    costs = match_profile(given, made.profile_id)
    cluster = read_devices(devices)
    from ...planner.explain import explain

    with working("explaining: planning with each change"):
        found = explain(made, costs, cluster, deadline_s=deadline)
    emit(found.model_dump_json(indent=2) if as_json else str(found))
    # The command that plans would plan training, unless the profile itself is for inference.
    is_reduced = costs is not given
    next_step = suggest_after_plan(made, plan)
    if not is_reduced:
        next_step = _suggest_change(found, made, plan, profile, devices)
    say_next(next_step, quiet=as_json)


def _suggest_change(found: Explanation, plan: Plan, file: Path, profile: Path, devices: str) -> str:
    """Return the command that plans with the most profitable change of options, if any."""
    # By the text of the explanation, which names these three in exactly these words.
    changes: dict[str, dict[str, object]] = {
        "twice the micro-batches": {"num_microbatches": 2 * found.num_microbatches},
        "recomputation allowed": {"recompute": "auto"},
        "replicas allowed": {"max_replicas": None},
    }
    candidates = [entry for entry in found.alternatives if entry.text in changes]
    best = max(candidates, key=lambda entry: entry.gain or 0.0, default=None)
    if best is None or (best.gain or 0.0) < MIN_GAIN:
        return suggest_after_plan(plan, file)
    changed = plan.options.model_copy(update=changes[best.text])
    # A fixed batch would make the micro-batches smaller instead of the step larger.
    if plan.options.batch_size is not None and "num_microbatches" in changes[best.text]:
        changed = changed.model_copy(update={"batch_size": 2 * plan.options.batch_size})
    return command_line("plan", profile, "-d", devices, *flags_of(changed))
