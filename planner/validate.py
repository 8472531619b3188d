"""Accept or reject any plan, whoever made it, by deriving its numbers again.

The numbers come from `recount`, not from the planner's tables, so that the two check each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from ..core.cluster import Cluster
from ..core.errors import InvalidInput, PlanMismatch
from ..core.plan import Baseline, Plan, Stage
from ..core.profile import Profile
from .recount import Split
from .schedules import too_many_stages
from .timeline import plan_timeline

TOLERANCE = 1e-9
"""Relative difference allowed between a time in the plan and the same time derived again."""


def validate(plan: Plan, profile: Profile, cluster: Cluster) -> None:
    """Check a plan against the profile and cluster it claims to be for.

    Layers, devices, legality of cuts, times, bytes, memory and its limits, the simulated step,
    the baselines, and the proof's value are derived again from the profile. The proof's bound is
    not: it has to be at most the value, and equal to it where the plan is called optimal.

    Raises:
        PlanMismatch: The plan is for another profile or cluster, or a number in it is wrong; the
            message lists every discrepancy found.
    """
    faults = list(_identity_faults(plan, profile))
    if plan.layer_names == tuple(entry.layer.name for entry in profile.layers):
        faults += _device_faults(plan, cluster)
        split = Split(plan.balance, profile, cluster, plan.options)
        faults += _cut_faults(plan, split)
        for index, stage in enumerate(plan.stages):
            faults += _stage_faults(stage, index, split)
        faults += _step_faults(plan, split)
        for baseline in plan.baselines:
            faults += _baseline_faults(baseline, split)
    else:
        faults.append("its layers are not the profile's, each once and in order")
    if faults:
        raise PlanMismatch("the plan does not hold:\n  " + "\n  ".join(faults))


def _identity_faults(plan: Plan, profile: Profile) -> Iterable[str]:
    """Whether plan and profile belong together."""
    if plan.profile_id != profile.content_id():
        source = plan.profile_id or "a profile it does not name"
        yield f"it was planned from {source}, this profile is {profile.content_id()}"
    for name, found, expected in (
        ("model", plan.model, profile.model),
        ("spec", plan.spec, profile.spec),
        ("inputs", plan.inputs, profile.inputs),
        ("input_structure", plan.input_structure, profile.input_structure),
        ("fixed_mode", plan.fixed_mode, profile.fixed_mode),
        ("estimated", plan.estimated, profile.provenance.source == "estimated"),
        ("schedule", plan.schedule, plan.options.schedule),
        ("num_microbatches", plan.num_microbatches, plan.options.num_microbatches),
    ):
        if found != expected:
            yield f"{name} is {found!r}, expected {expected!r}"
    if plan.options.num_stages not in (None, plan.num_stages):
        yield f"it has {plan.num_stages} stages, {plan.options.num_stages} were asked for"


def _device_faults(plan: Plan, cluster: Cluster) -> Iterable[str]:
    """Stage s runs on the cluster's device s."""
    for index, stage in enumerate(plan.stages):
        expected = cluster.devices[index].name if index < len(cluster.devices) else None
        if stage.devices != (expected,):
            yield f"stage {index} is on {', '.join(stage.devices)}, expected {expected or 'none'}"
        if stage.recompute != "never" or stage.strategy != "single":
            yield f"stage {index} asks for recomputation or replicas, which are not priced yet"


def _cut_faults(plan: Plan, split: Split) -> Iterable[str]:
    """As many stages as the schedule takes, legal cuts, and the profile's account of them."""
    options = split.options
    refusal = too_many_stages(options.schedule, split.num_stages, options.num_microbatches)
    if refusal:
        yield refusal
    expected = split.boundaries()
    for index, boundary in enumerate(expected):
        if not boundary.legal:
            yield f"the cut behind stage {index} is not legal: {boundary.reason}"
    if len(plan.boundaries) != len(expected):
        yield f"it lists {len(plan.boundaries)} boundaries for {len(expected)} cuts"
    for index, (found, boundary) in enumerate(zip(plan.boundaries, expected, strict=False)):
        if found != boundary:
            yield f"boundaries[{index}] is not the profile's boundary after {boundary.after}"


def _stage_faults(stage: Stage, index: int, split: Split) -> Iterable[str]:
    """One stage's times, bytes, modules and memory."""
    forward_s, backward_s = split.work_s(index)
    forward_bytes, forward_send_s = split.send_forward(index)
    backward_bytes, backward_send_s = split.send_backward(index)
    for name, found_s, expected_s in (
        ("forward_time_s", stage.forward_time_s, forward_s),
        ("backward_time_s", stage.backward_time_s, backward_s),
        ("send_forward_time_s", stage.send_forward_time_s, forward_send_s),
        ("send_backward_time_s", stage.send_backward_time_s, backward_send_s),
    ):
        if not math.isclose(found_s, expected_s, rel_tol=TOLERANCE):
            yield f"stage {index}: {name} is {found_s!r}, expected {expected_s!r}"
    layers = [split.profile.layers[layer].layer for layer in split.layers(index)]
    fqns = {fqn for layer in layers for fqn in layer.module_fqns}
    memory, limit = split.memory(index), split.limit_bytes(index)
    for name, found, expected in (
        ("send_forward_bytes", stage.send_forward_bytes, forward_bytes),
        ("send_backward_bytes", stage.send_backward_bytes, backward_bytes),
        ("module_fqns", sorted(stage.module_fqns), sorted(fqns)),
        ("in_flight", stage.in_flight, split.in_flight(index)),
        ("memory", stage.memory, memory),
        ("memory_limit_bytes", stage.memory_limit_bytes, limit),
    ):
        if found != expected:
            yield f"stage {index}: {name} is {found}, expected {expected}"
    if limit is not None and memory.total_bytes > limit:
        yield f"stage {index}: needs {memory.total_bytes} bytes, its device allows {limit}"


def _step_faults(plan: Plan, split: Split) -> Iterable[str]:
    """The step as a whole: tied gradients, simulated time, bubble, proof."""
    tied_s = split.tied_sync_s()
    if not math.isclose(plan.tied_sync_time_s, tied_s, rel_tol=TOLERANCE):
        yield f"tied_sync_time_s is {plan.tied_sync_time_s!r}, expected {tied_s!r}"
    try:
        timeline = plan_timeline(plan)
    except InvalidInput as error:
        yield str(error)
        return
    if not math.isclose(plan.step_time_s, timeline.step_time_s, rel_tol=TOLERANCE):
        yield f"step_time_s is {plan.step_time_s!r}, simulated {timeline.step_time_s!r}"
    if not math.isclose(plan.bubble_fraction, timeline.bubble_fraction, abs_tol=TOLERANCE):
        yield f"bubble_fraction is {plan.bubble_fraction!r}, simulated {timeline.bubble_fraction!r}"
    value_s, proof = split.objective_s(), plan.proof
    if not math.isclose(proof.value, value_s, rel_tol=TOLERANCE):
        yield f"proof.value is {proof.value!r}, expected {value_s!r}"
    if proof.lower_bound > proof.value:
        yield f"proof.lower_bound {proof.lower_bound!r} is above proof.value {proof.value!r}"
    is_proven = math.isclose(proof.lower_bound, proof.value, rel_tol=TOLERANCE)
    if proof.status == "optimal" and not is_proven:
        yield f"proof.status is 'optimal' with a gap of {proof.gap:.3g}"


def _baseline_faults(baseline: Baseline, split: Split) -> Iterable[str]:
    """Another split into as many stages, with the time it would take, or none if not usable."""
    counts, num_layers = baseline.balance, len(split.profile.layers)
    if len(counts) != split.num_stages or min(counts) < 1 or sum(counts) != num_layers:
        yield (
            f"baseline {baseline.name!r} is {list(counts)}, which is not {num_layers} layers in "
            f"{split.num_stages} stages"
        )
        return
    if baseline.name == "equal_layers" and not _is_equal(counts):
        yield f"baseline {baseline.name!r} is {list(counts)}, which are not equal layer counts"
    other = replace(split, counts=counts)
    found_s, expected_s = baseline.step_time_s, other.step_time_s() if other.is_usable() else None
    if found_s is None or expected_s is None:
        is_right = found_s is expected_s
    else:
        is_right = math.isclose(found_s, expected_s, rel_tol=TOLERANCE)
    if not is_right:
        yield f"baseline {baseline.name!r}: step_time_s is {found_s!r}, expected {expected_s!r}"


def _is_equal(counts: tuple[int, ...]) -> bool:
    """Whether counts differ by at most one, the larger ones in front."""
    return counts[0] - counts[-1] <= 1 and list(counts) == sorted(counts, reverse=True)
