"""``stagewright explain``: what bounds a plan, and which changes would speed it up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

from typer import Argument, Option

from ...core.errors import InvalidInput
from ...view.option_flags import flags_of
from ..support.named_models import PlanSource, recall_source
from ..support.next_steps import command_line, drop_flags, suggest_after_plan
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
        Path | None,
        Argument(
            metavar="PROFILE",
            help="The profile the plan was made from; may be left out, as --devices may, for the "
            "plan of a named model while its estimate is in the cache.",
        ),
    ] = None,
    devices: Annotated[
        str | None,
        Option("--devices", "-d", help="Devices of the plan: 4x24GB, or a cluster file."),
    ] = None,
    deadline: Annotated[
        float | None, Option(help="Time limit in seconds for all comparisons.", min=0.0)
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Explain what bounds a plan's step, what changes would gain, and what other methods find."""
    from ...core.plan.plan import Plan
    from ...core.profile.forward_only import match_profile

    made = read_document(plan, Plan)
    source = _find_source(made, plan, profile, devices)
    costs = match_profile(source.profile, made.profile_id)
    from ...planner.explain import explain

    with working("explaining: planning with each change"):
        found = explain(made, costs, source.cluster, deadline_s=deadline)
    emit(found.model_dump_json(indent=2) if as_json else str(found))
    # The command that plans would plan training, unless the profile itself is for inference.
    is_reduced = costs is not source.profile
    next_step = suggest_after_plan(made, plan)
    if not is_reduced:
        next_step = _suggest_change(found, made, plan, source)
    say_next(next_step, quiet=as_json)


def _find_source(plan: Plan, file: Path, profile: Path | None, devices: str | None) -> PlanSource:
    """Return the plan's profile and devices, from the cache if no profile is given."""
    from ...core.profile.profile import Profile

    if profile is not None:
        if devices is None:
            raise InvalidInput("name the plan's devices as well: --devices 4x24GB")
        words = (str(profile), "-d", devices)
        return PlanSource(read_document(profile, Profile), read_devices(devices), words)
    found = recall_source(plan)
    if found is None:
        why = (
            f"the estimate that {file} was made from is not in the cache"
            if plan.estimated
            else f"{file} was made from a profile of its own, which a plan does not hold"
        )
        raise InvalidInput(
            f"{why}; give the plan's profile and devices: stagewright explain {file} PROFILE "
            "--devices 4x24GB"
        )
    if devices is not None:
        given = (found.words[0], "-d", devices, *found.words[3:])
        found = replace(found, cluster=read_devices(devices), words=given)
    return found


def _suggest_change(found: Explanation, plan: Plan, file: Path, source: PlanSource) -> str:
    """Return the command that plans with the most profitable change of options, if any."""
    from ...core.plan.schedule import TrainingSchedule

    # By the text of the explanation, which names these in exactly these words.
    changes: dict[str, dict[str, object]] = {
        "twice the micro-batches": {"num_microbatches": 2 * found.num_microbatches},
        "recomputation allowed": {"recompute": "auto"},
        "replicas allowed": {"max_replicas": None},
        **{f"schedule {name}": {"schedule": name} for name in get_args(TrainingSchedule)},
    }
    candidates = [entry for entry in found.alternatives if entry.text in changes]
    best = max(candidates, key=lambda entry: entry.gain or 0.0, default=None)
    if best is None or (best.gain or 0.0) < MIN_GAIN:
        return suggest_after_plan(plan, file)
    changed = plan.options.model_copy(update=changes[best.text])
    # A fixed batch would make the micro-batches smaller instead of the step larger.
    if plan.options.batch_size is not None and "num_microbatches" in changes[best.text]:
        changed = changed.model_copy(update={"batch_size": 2 * plan.options.batch_size})
    flags = drop_flags(flags_of(changed), [], source.fixed)
    return command_line("plan", *source.words, *flags)
