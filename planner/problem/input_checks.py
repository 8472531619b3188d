"""Checks of what a caller passes, before anything is planned.

Types of arguments, which options go together (the table is in `docs/concepts/planner.md`), and
numbers whose sums would overflow or lose bytes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from fractions import Fraction
from numbers import Real
from pathlib import Path

from ...core.cluster.cluster import Cluster
from ...core.cluster.pair_links import list_pair_links
from ...core.errors import InvalidInput
from ...core.models.training_memory import training_bytes
from ...core.plan.plan import Plan, PlanOptions
from ...core.profile.profile import Profile, list_parameters
from ...core.profile.scale import scale_profile
from ...core.units import name_type
from ...schedules.traits import FOLDED, SEVERAL_STAGES
from ..cost.device_classes import LARGEST_TOTAL_BYTES, LARGEST_TOTAL_S, Devices

CHUNKED = tuple(name for name in SEVERAL_STAGES if name not in FOLDED)
"""Schedules whose number of stages per device can be chosen."""

TRAINING_ONLY = (
    "schedule", "num_microbatches", "max_replicas", "strategies", "recompute", "optimizer"
)  # fmt: skip
"""Options of a training step, without effect on ``latency``: one forward, no backward."""


def require_profiles(profile: Profile | Sequence[Profile]) -> tuple[Profile, ...]:
    """Return one or several profiles as a tuple."""
    if isinstance(profile, str) or not isinstance(profile, Sequence):
        return (require_profile(profile),)
    if not profile:
        raise InvalidInput("give at least one profile", field="/profile")
    return tuple(map(require_profile, profile))


def require_profile(profile: Profile | str) -> Profile:
    """Return the profile, or raise `InvalidInput` if it is something else, such as a path."""
    if isinstance(profile, Profile):
        return profile
    raise _wrong_type("profile", "Profile", profile)


def require_plan(plan: Plan | str) -> Plan:
    """Return the plan, or raise `InvalidInput` if it is something else, such as a path."""
    if isinstance(plan, Plan):
        return plan
    raise _wrong_type("plan", "Plan", plan)


def _wrong_type(name: str, expected: str, found: object) -> InvalidInput:
    remedy = f"give a {expected}"
    if isinstance(found, str | Path):
        remedy = f"read it first: {expected}.read({str(found)!r})"
    return InvalidInput(f"the {name} is {name_type(found)}; {remedy}", field=f"/{name}")


def parse_cluster(cluster: Cluster | str) -> Cluster:
    """Return the cluster, parsed if it is given as shorthand."""
    if isinstance(cluster, str):
        return Cluster.parse(cluster)
    if not isinstance(cluster, Cluster):
        raise InvalidInput(
            f"the cluster is {name_type(cluster)}; give a Cluster, or its shorthand such as "
            "'4x24GB'",
            field="/cluster",
        )
    return cluster


def require_options(options: PlanOptions | None) -> PlanOptions:
    """Return the options, or the defaults for `None`; raise `InvalidInput` for anything else."""
    if options is None:
        return PlanOptions()
    if not isinstance(options, PlanOptions):
        raise InvalidInput(
            f"the options are {name_type(options)}; give PlanOptions(num_stages=4, ...)",
            field="/options",
        )
    return options


def compute_deadline(deadline_s: float | None) -> float:
    """Return the deadline on the clock of `time.monotonic`; infinite for `None`."""
    if deadline_s is None:
        return math.inf
    is_number = isinstance(deadline_s, Real) and not isinstance(deadline_s, bool)
    if not is_number or not deadline_s >= 0:
        raise InvalidInput(
            f"deadline_s is {deadline_s!r}; give seconds of at least 0, or None for no deadline",
            field="/deadline_s",
        )
    return time.monotonic() + deadline_s


def scale_to_plan(plan: Plan, profile: Profile) -> Profile:
    """Return the profile scale_profile to the micro-batch size of a plan that chose it itself."""
    if plan.options.batch_size is None or not plan.inputs or not profile.inputs:
        return profile
    before, after = profile.inputs[0].shape, plan.inputs[0].shape
    if not before or not after or not before[0] or not after[0]:
        return profile
    return scale_profile(profile, Fraction(after[0], before[0]))


TIMED = ("step_time", "throughput", "latency")
"""Objectives whose best plan depends on how far layers and links are off."""

LEVELS_ONLY = ("memory", "devices", "pipedream")
"""Objectives that link two devices by the level that joins them, whatever pair they are."""


def check_options(options: PlanOptions) -> None:
    """Refuse options that no plan of this objective and schedule can keep or use."""
    if not _is_default(options, "chunks"):
        _check_chunks(options)
    if options.max_extra_in_flight:
        _check_extra(options)
    if options.max_stages is not None and (options.num_stages or 0) > options.max_stages:
        raise InvalidInput(
            f"num_stages={options.num_stages} is more than max_stages={options.max_stages}; give "
            "only one of them",
            field="/options/num_stages",
        )
    if options.schedule in SEVERAL_STAGES and options.objective != "latency":
        _check_stage_counts(options)
    _check_regular(options)
    if options.robust and options.objective not in TIMED:
        raise InvalidInput(
            f"robust has no effect with the objective {options.objective!r}, whose best plan does "
            f"not depend on how far times are off; choose one of {', '.join(TIMED)}",
            field="/options/robust",
        )


def check_links(cluster: Cluster, options: PlanOptions) -> None:
    """Refuse links of pairs of groups for objectives whose search knows levels only."""
    if cluster.links and options.objective in LEVELS_ONLY:
        raise InvalidInput(
            f"the cluster has links between pairs of groups ({cluster.links[0]}), but the "
            f"objective {options.objective!r} knows links by level only; plan for 'step_time', or "
            "leave out the cluster's 'links'",
            field="/options/objective",
        )


def _check_regular(options: PlanOptions) -> None:
    if options.regular == "no" and options.regular_within is not None:
        raise InvalidInput(
            f"regular_within={options.regular_within} has no effect with regular='no'; choose "
            "'grid' or 'equal_blocks', or leave it out",
            field="/options/regular_within",
        )
    if options.regular == "equal_blocks" and options.layer_order == "any":
        raise InvalidInput(
            "regular='equal_blocks' counts blocks in the profile's own order; leave layer_order "
            "at 'given', or choose 'grid'",
            field="/options/regular",
        )


def count_chunks(options: PlanOptions) -> int:
    """Return the number of stages per device."""
    if options.objective == "latency" or options.schedule not in SEVERAL_STAGES:
        return 1
    return 2 if options.schedule in FOLDED else options.chunks


def _check_stage_counts(options: PlanOptions) -> None:
    chunks = count_chunks(options)
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
    """Return notes on options without effect: on the objective, or without replicas."""
    if options.objective == "latency":
        unused = [name for name in TRAINING_ONLY if not _is_default(options, name)]
        if not unused:
            return []
        return [f"latency is of one micro-batch's forward, on which {_listed(unused)} no effect"]
    if options.max_replicas == 1 and not _is_default(options, "strategies"):
        named = ",".join(options.strategies)
        return [
            f"strategies={named} has no effect: no stage may have replicas; allow them with "
            "max_replicas=None"
        ]
    return []


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
        f"chunks={options.chunks} has no effect: {why}; leave it at its default, or choose "
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
        "at 0, or choose 'step_time' with the 1f1b schedule",
        field="/options/max_extra_in_flight",
    )


def _is_default(options: PlanOptions, name: str) -> bool:
    return bool(getattr(options, name) == PlanOptions.model_fields[name].default)


def _listed(names: list[str]) -> str:
    """Return, for example, ``schedule has`` or ``schedule and optimizer have``."""
    if len(names) == 1:
        return f"{names[0]} has"
    return f"{', '.join(names[:-1])} and {names[-1]} have"


def check_magnitude(profile: Profile, devices: Devices, options: PlanOptions) -> None:
    """Raise `InvalidInput` if sums of times or bytes would overflow or lose precision."""
    _check_bytes(profile, options)
    _check_times(profile, devices, options)
    _check_links(profile, devices.cluster, options)


def _check_bytes(profile: Profile, options: PlanOptions) -> None:
    training = training_bytes(options.precision, options.optimizer)
    parameters = list_parameters(profile)
    resident = sum(entry.size_bytes * 2 + training.of(entry.numel) for entry in parameters)
    per_microbatch = (
        sum(entry.size_bytes for entry in profile.storages)
        + sum(entry.saved_activation_bytes for entry in profile.layers)
        + sum(gap.forward_bytes + gap.backward_bytes for gap in profile.boundaries)
        + sum(tensor.size_bytes for tensor in profile.inputs)
        + (profile.loss.saved_activation_bytes if profile.loss else 0)
    )
    workspace = sum(entry.workspace_bytes for entry in profile.layers)
    total = resident + workspace + options.num_microbatches * per_microbatch
    if total > LARGEST_TOTAL_BYTES:
        raise InvalidInput(
            f"the profile's bytes add up to {total} over {options.num_microbatches} "
            f"micro-batches; at most {LARGEST_TOTAL_BYTES} (1 EiB) are accepted"
        )


def _check_times(profile: Profile, devices: Devices, options: PlanOptions) -> None:
    total_s = sum(entry.forward.median_s + entry.backward.median_s for entry in profile.layers)
    if profile.loss:
        total_s += profile.loss.forward.median_s + profile.loss.backward.median_s
    slowest = min(*(entry.speed for entry in devices.classes), 1.0)
    if not total_s / slowest * options.num_microbatches < LARGEST_TOTAL_S:
        raise InvalidInput(
            f"the profile's times add up to {total_s} s; less than {LARGEST_TOTAL_S:g} s over all "
            "micro-batches is accepted"
        )


def _check_links(profile: Profile, cluster: Cluster, options: PlanOptions) -> None:
    num_devices = len(cluster.devices)
    parameters = list_parameters(profile)
    whole = sum(entry.size_bytes for entry in parameters)
    tied = [entry.size_bytes for entry in parameters if len(entry.layers) > 1]
    for level in (*cluster.levels, *list_pair_links(cluster)):
        per_microbatch_s = sum(
            level.transfer_time_s(gap.forward_bytes) + level.transfer_time_s(gap.backward_bytes)
            for gap in profile.boundaries
        )
        knots = level.all_reduce.bandwidth if level.all_reduce else ()
        counts = {2, num_devices, *(count for count, _ in knots if count < num_devices)}
        summed_s = max(
            sum(level.all_reduce_time_s(size, number) for size in (whole, *tied))
            for number in counts
        )
        total_s = per_microbatch_s * options.num_microbatches + summed_s
        if not total_s < LARGEST_TOTAL_S:
            raise InvalidInput(
                f"link level {level.name!r} would take {total_s:g} s to send what the profile "
                f"exchanges; less than {LARGEST_TOTAL_S:g} s is accepted"
            )
