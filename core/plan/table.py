"""Plain-text table of a plan: a row per stage, then the step time, baselines and proof."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..text_table import format_table, sanitize
from ..units import count, format_bytes, format_time
from .assumptions import describe_pipelines

if TYPE_CHECKING:
    from .plan import Baseline, Objective, Plan, Stage

BASELINE_NAMES = {
    "equal_layers": "equal layer counts",
    "balance_by_time": "even times",
    "data_parallel": "data parallel",
}

NOT_TIMES: tuple[Objective, ...] = ("memory", "devices", "balance_size")
"""Objectives that do not aim at speed: the distance to the fastest plan says nothing about them."""

MAX_COUNTS = 16
"""Most layer counts listed."""


def format_plan(plan: Plan, *, details: bool = False) -> str:
    """Format a plan as `print(plan)` shows it; ``details`` adds those of the proof."""
    rows = list(zip(*build_plan_columns(plan), strict=True))
    return "\n".join([format_table(rows), "", *format_summary(plan, details=details)])


def build_plan_columns(plan: Plan) -> list[tuple[str, ...]]:
    """Return each column's heading and cells, without the columns that this plan does not use."""
    stages = plan.stages
    hidden: set[str] = set()
    if all(stage.replicas == 1 for stage in stages):
        hidden |= {"replicas", "sync"}
    if all(stage.tensor == 1 for stage in stages):
        hidden |= {"tensor"}
    if all(stage.strategy in ("single", "replicate") for stage in stages):
        hidden |= {"strategy"}
    if all(stage.recompute == "never" for stage in stages):
        hidden |= {"recompute"}
    if not any(stage.reserved.total_bytes for stage in stages):
        hidden |= {"reserved"}
    if plan.schedule == "forward_only" or not any(stage.backward_time_s for stage in stages):
        hidden |= {"backward", "sends back"}
    return [
        ("stage", *map(str, range(len(stages)))),
        *((heading, *map(cell, stages)) for heading, cell in COLUMNS if heading not in hidden),
    ]


def _devices(stage: Stage) -> str:
    names = stage.devices
    return ",".join(names) if len(names) < 3 else f"{names[0]}..{names[-1]}"


def _limit(stage: Stage) -> str:
    return "none" if stage.memory_limit_bytes is None else format_bytes(stage.memory_limit_bytes)


def _reserved(stage: Stage) -> str:
    return format_bytes(stage.reserved.total_bytes)


def _used(stage: Stage) -> str:
    limit = stage.memory_limit_bytes
    return f"{stage.memory.total_bytes / limit:.0%}" if limit else ""


# The only list of a plan's columns: print(plan), narrow terminals and notebooks all read it.
COLUMNS: tuple[tuple[str, Callable[[Stage], str]], ...] = (
    ("device", _devices),
    ("replicas", lambda stage: str(stage.replicas)),
    ("tensor", lambda stage: str(stage.tensor)),
    ("strategy", lambda stage: stage.strategy.replace("_", " ")),
    ("layers", lambda stage: str(stage.num_layers)),
    ("forward", lambda stage: format_time(stage.forward_time_s)),
    ("backward", lambda stage: format_time(stage.backward_time_s)),
    ("recompute", lambda stage: stage.recompute.replace("_", " ")),
    ("in flight", lambda stage: str(stage.in_flight)),
    ("memory", lambda stage: format_bytes(stage.memory.total_bytes)),
    ("reserved", _reserved),
    ("limit", _limit),
    ("used", _used),
    ("sends on", lambda stage: format_bytes(stage.send_forward_bytes)),
    ("sends back", lambda stage: format_bytes(stage.send_backward_bytes)),
    ("sync", lambda stage: format_time(stage.sync_time_s)),
    ("from", lambda stage: stage.layer_names[0]),
    ("to", lambda stage: stage.layer_names[-1]),
)


def format_summary(plan: Plan, *, details: bool = False) -> list[str]:
    """Format step time, baselines, proof and notes, a line each."""
    lines = [
        f"step time {format_time(plan.step_time_s)} ({describe_step(plan)}), "
        f"bubble {plan.bubble_fraction:.1%}",
        *_past_stages(plan),
        *_shared_devices(plan),
        *format_training_memory(plan),
        *(_gain(plan.step_time_s, baseline) for baseline in plan.baselines),
        f"proof: {format_verdict(plan)}",
        *(format_proof(plan) if details else ()),
        *(f"note: {note}" for note in plan.notes),
    ]
    return [sanitize(line) for line in lines]


def _shared_devices(plan: Plan) -> list[str]:
    """Format the memory of devices that hold several stages, whose columns show each stage's."""
    stages: dict[str, list[int]] = {}
    for index, stage in enumerate(plan.stages):
        for name in stage.devices:
            stages.setdefault(name, []).append(index)
    lines = []
    for name, size in plan.memory_by_device().items():
        if len(held := stages[name]) > 1:
            limit = plan.stages[held[0]].memory_limit_bytes
            used = f" of {format_bytes(limit)} ({size / limit:.0%})" if limit else ""
            listed = ", ".join(map(str, held))
            lines.append(f"device {name} holds {format_bytes(size)}{used} in stages {listed}")
    more = [f"and {len(lines) - MAX_COUNTS} more devices"] if len(lines) > MAX_COUNTS else []
    return lines[:MAX_COUNTS] + more


def format_training_memory(plan: Plan) -> list[str]:
    """Format the recipe with its bytes a parameter, and what is reserved of devices."""
    lines = []
    if plan.bytes_per_parameter is not None and plan.schedule != "forward_only":
        lines.append(
            f"precision {plan.options.precision} with {plan.options.optimizer}: "
            f"{plan.bytes_per_parameter}"
        )
    reserved = plan.stages[0].reserved
    terms = (
        ("CUDA context", reserved.context_bytes),
        ("communication", reserved.communication_bytes),
        ("fragmentation", reserved.fragmentation_bytes),
    )
    if reserved.total_bytes:
        listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in terms if size)
        lines.append(f"reserved on device {plan.stages[0].devices[0]}: {listed}")
    return lines


def _past_stages(plan: Plan) -> list[str]:
    """Format the direct sends, which are not part of the column of sent bytes."""
    sends = [
        f"{send.source} to {send.target} {format_bytes(send.forward_bytes + send.backward_bytes)}"
        for send in plan.direct_sends
    ]
    if not sends:
        return []
    more = f" and {len(sends) - MAX_COUNTS} more" if len(sends) > MAX_COUNTS else ""
    return [f"direct sends: {', '.join(sends[:MAX_COUNTS])}{more}"]


def describe_step(plan: Plan) -> str:
    """Describe what a step is of: schedule, micro-batches and the source of the times."""
    return f"{plan.schedule}, {count(plan.num_microbatches, 'micro-batch')}, {_source(plan)}"


def _source(plan: Plan) -> str:
    """Describe the source of the times, with the error to expect if it is known."""
    if not plan.estimated:
        return "MEASURED profile"
    return ", ".join(filter(None, ("ESTIMATED profile", describe_error(plan))))


def describe_error(plan: Plan) -> str:
    """Describe the error to expect of an estimated step; return "" if it is not known."""
    if plan.error_band is None:
        return ""
    if plan.num_stages == 1:
        return f"expected error {plan.error_band:.0%}"
    return f"unsplit steps within {plan.error_band:.0%}, {describe_pipelines()}"


def format_verdict(plan: Plan) -> str:
    """Say in one line how far the plan can be from the best possible one."""
    proof = plan.proof
    if proof.status == "optimal":
        return "optimal"
    if not proof.lower_bound:
        return "no lower bound known"
    # `gap` is relative to the plan's value; people read the excess over the bound.
    return f"at most {_percent(proof.value / proof.lower_bound - 1)} above the best possible"


def format_proof(plan: Plan) -> list[str]:
    """Compare the plan's objective and its simulated step with their lower bounds, a line each."""
    proof, objective = plan.proof, plan.options.objective
    value = format_objective(objective, proof.value)
    verdict = format_verdict(plan)
    if proof.status != "optimal" and proof.lower_bound:
        verdict += f" ({format_objective(objective, proof.lower_bound)})"
    lines = [f"proof: {proof.objective}: {value}, {verdict}"]
    bound_s = proof.simulated_lower_bound_s
    if bound_s > 0 and objective not in (*NOT_TIMES, "step_time"):
        excess = _percent(plan.step_time_s / bound_s - 1)
        near = f"at most {excess} above" if plan.simulated_gap > 1e-9 else "equal to"
        lines.append(f"proof: simulated step {near} the lower bound ({format_time(bound_s)})")
    return lines


def format_objective(objective: Objective, value: float) -> str:
    """Format a value of an objective in its unit."""
    if objective in ("memory", "balance_size"):
        return format_bytes(value)
    if objective == "devices":
        return f"{value:.0f}"
    return format_time(value)


def format_best_so_far(objective: Objective, value: float, lower_bound: float) -> str:
    """Describe the best plan that a search has found so far and the bound on any plan, if known."""
    text = f"{format_objective(objective, value)} so far"
    if 0 < lower_bound <= value:
        text += f", lower bound {format_objective(objective, lower_bound)}"
    return text


def _percent(share: float) -> str:
    """Format a share, rounded up to a tenth of a percent, so that "at most" remains true."""
    return f"{math.ceil(share * 1e3 - 1e-6) / 10:.1f} %"


def _gain(step_time_s: float, baseline: Baseline) -> str:
    """Compare the plan with a baseline, in a line."""
    what = f"{BASELINE_NAMES.get(baseline.name, baseline.name)} {_split(baseline)}"
    other_s = baseline.step_time_s
    if other_s is None:
        return f"{what} cannot be used{': ' if baseline.reason else ''}{baseline.reason}"
    return f"{what}: {format_time(other_s)}; this plan {_compared(step_time_s, other_s)}"


def _compared(step_time_s: float, other_s: float) -> str:
    """Compare two times: in percent, or as a multiple if one is at least twice the other."""
    faster, slower = sorted((step_time_s, other_s))
    # Differences below 0.05 % would be printed as 0.0 %.
    ratio = slower / faster if faster else 1.0
    if ratio < 1.0005:
        return "takes the same time"
    if ratio < 2:
        return f"is {ratio - 1:.1%} {'faster' if step_time_s < other_s else 'slower'}"
    times = f"{ratio:.1f} times as"
    return f"is {times} fast" if step_time_s < other_s else f"takes {times} long"


def _split(baseline: Baseline) -> str:
    replicas = tuple(len(names) for names in baseline.devices)
    if len(replicas) == 1:
        return f"on {count(replicas[0], 'device')}"
    if replicas:
        return f"{_counts(baseline.balance)}, one device a stage"
    return _counts(baseline.balance)


def _counts(balance: tuple[int, ...]) -> str:
    if len(balance) <= MAX_COUNTS:
        return str(list(balance))
    shown = ", ".join(map(str, balance[: MAX_COUNTS // 2]))
    return f"[{shown}, ... {len(balance)} stages]"
