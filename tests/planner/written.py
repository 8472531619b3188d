"""A plan somebody else made: a split written down as a document without the planner."""

from __future__ import annotations

from stagewright.core.plan.plan import Plan, Proof, Stage
from stagewright.planner.simulator.plan_timeline import plan_timeline


def written(split, *, lower_bound=0.0):
    """The plan of a split, its numbers counted by `recount` and its step simulated."""
    profile, options = split.profile, split.options
    only_forward = options.objective == "latency"
    forward_channels, backward_channels = split.channels()
    plan = Plan(
        model=profile.model,
        spec=profile.spec,
        balance=split.counts,
        stages=tuple(_stage(split, stage) for stage in range(split.num_stages)),
        boundaries=split.boundaries(),
        options=options,
        schedule="forward_only" if only_forward else options.schedule,
        num_microbatches=1 if only_forward else options.num_microbatches,
        chunks=split.chunks,
        forward_channels=forward_channels,
        backward_channels=backward_channels,
        step_time_s=0,
        bubble_fraction=0,
        tied_sync_time_s=split.tied_sync_s(),
        proof=Proof(
            objective="a test's",
            value=split.objective(),
            lower_bound=lower_bound,
            status="feasible",
            simulated_lower_bound_s=split.bound_s(),
        ),
        profile_id=profile.content_id(),
        inputs=profile.inputs,
        input_structure=profile.input_structure,
        fixed_mode=profile.fixed_mode,
    )
    timeline = plan_timeline(plan)
    fields = {
        "proof": plan.proof.model_copy(update={"value": timeline.step_time_s})
        if options.objective == "step_time"
        else plan.proof,
        "step_time_s": timeline.step_time_s,
        "bubble_fraction": max(0.0, timeline.bubble_fraction),
    }
    return Plan.model_validate({**dict(plan), **fields})


def _stage(split, stage):
    layers = split.layers(stage)
    entries = [split.profile.layers[layer].layer for layer in layers]
    forward_s, backward_s = split.work_s(stage)
    forward_bytes, send_forward_s = split.send_forward(stage)
    backward_bytes, send_backward_s = split.send_backward(stage)
    replicas = split.replicas(stage)
    return Stage(
        first_layer=layers[0],
        num_layers=len(layers),
        layer_names=tuple(entry.name for entry in entries),
        module_fqns=tuple(dict.fromkeys(fqn for entry in entries for fqn in entry.module_fqns)),
        devices=tuple(split.cluster.devices[device].name for device in split.devices[stage]),
        forward_time_s=forward_s,
        backward_time_s=backward_s,
        send_forward_bytes=forward_bytes,
        send_backward_bytes=backward_bytes,
        send_forward_time_s=send_forward_s,
        send_backward_time_s=send_backward_s,
        memory=split.memory(stage),
        memory_limit_bytes=split.limit_bytes(stage),
        sync_time_s=split.sync_s(stage),
        in_flight=split.in_flight(stage),
        replicas=replicas,
        recompute="always" if split.recomputes(stage) else "never",
        strategy="single" if replicas == 1 else "replicate",
    )
