"""Which options go with which objective and schedule; the table is in `docs/planner.md`."""

from __future__ import annotations

from ...core.errors import InvalidInput
from ...core.plan.plan import PlanOptions
from ...schedules.traits import FOLDED, SEVERAL_STAGES

CHUNKED = tuple(name for name in SEVERAL_STAGES if name not in FOLDED)
"""Schedules whose number of stages a device may be chosen."""

TRAINING_ONLY = ("schedule", "num_microbatches", "max_replicas", "recompute", "optimizer")
"""What describes a training step, of which ``latency`` has nothing: one forward, no backward."""


def check_options(options: PlanOptions) -> None:
    """Refuse options that no plan of this objective and schedule could keep or make use of.

    Raises:
        InvalidInput: Names the option, and what to ask for instead.
    """
    if not _is_default(options, "chunks"):
        _check_chunks(options)
    if options.max_extra_in_flight:
        _check_extra(options)
    if options.max_stages is not None and (options.num_stages or 0) > options.max_stages:
        raise InvalidInput(
            f"num_stages={options.num_stages} is more than max_stages={options.max_stages}; ask "
            "for one of them",
            field="/options/num_stages",
        )
    if options.schedule in SEVERAL_STAGES and options.objective != "latency":
        _check_laps(options)


def chunks_of(options: PlanOptions) -> int:
    """Stages a device."""
    if options.objective == "latency" or options.schedule not in SEVERAL_STAGES:
        return 1
    return 2 if options.schedule in FOLDED else options.chunks


def _check_laps(options: PlanOptions) -> None:
    chunks = chunks_of(options)
    each = f"the {options.schedule} schedule puts {chunks} stages on each device"
    wanted = options.num_stages
    if wanted is not None and wanted % chunks:
        raise InvalidInput(
            f"{each}, and num_stages={wanted} is not a multiple of {chunks}; ask for "
            f"{-(-wanted // chunks) * chunks}",
            field="/options/num_stages",
        )
    if options.max_stages is not None and options.max_stages < chunks:
        raise InvalidInput(
            f"{each}, more than max_stages={options.max_stages}; allow {chunks}, or ask for "
            "another schedule",
            field="/options/max_stages",
        )


def option_notes(options: PlanOptions) -> list[str]:
    """What was asked for and describes nothing that this objective has."""
    if options.objective != "latency":
        return []
    unused = [name for name in TRAINING_ONLY if not _is_default(options, name)]
    if not unused:
        return []
    return [f"latency is of one micro-batch's forward, on which {_listed(unused)} no effect"]


def _check_chunks(options: PlanOptions) -> None:
    if options.schedule in CHUNKED and options.objective != "latency":
        return
    if options.schedule in FOLDED:
        why = f"the {options.schedule} schedule always puts 2 stages on a device"
    elif options.objective == "latency":
        why = "a plan for 'latency' puts 1 stage on a device"
    else:
        why = f"the {options.schedule} schedule puts 1 stage on a device"
    raise InvalidInput(
        f"chunks={options.chunks} has no effect, {why}; leave it at its default, or ask for "
        f"'step_time' with one of {', '.join(CHUNKED)}",
        field="/options/chunks",
    )


def _check_extra(options: PlanOptions) -> None:
    if options.objective == "step_time" and options.schedule == "1f1b":
        return
    what = (
        f"the objective {options.objective!r}"
        if options.objective != "step_time"
        else f"the {options.schedule} schedule"
    )
    raise InvalidInput(
        f"max_extra_in_flight={options.max_extra_in_flight} has no effect with {what}; leave it "
        "at 0, or ask for 'step_time' with the 1f1b schedule",
        field="/options/max_extra_in_flight",
    )


def _is_default(options: PlanOptions, name: str) -> bool:
    return bool(getattr(options, name) == PlanOptions.model_fields[name].default)


def _listed(names: list[str]) -> str:
    """For example ``schedule has`` or ``schedule and optimizer have``."""
    if len(names) == 1:
        return f"{names[0]} has"
    return f"{', '.join(names[:-1])} and {names[-1]} have"
