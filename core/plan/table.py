"""A plan as plain text: one row a stage, then what the step will be and how good that is."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ..text_table import format_table, sanitize
from ..units import count, format_bytes, format_time

if TYPE_CHECKING:
    from .plan import Baseline, Objective, Plan, Stage

BASELINE_NAMES = {
    "equal_layers": "equal layer counts",
    "balance_by_time": "even times",
    "data_parallel": "data parallel",
}

NOT_TIMES: tuple[Objective, ...] = ("memory", "devices", "balance_size")
"""Plans by these are not meant to be fast, and how far they are from the fastest is no proof."""

MAX_COUNTS = 16
"""Longer lists of layer counts are cut short."""


def format_plan(plan: Plan) -> str:
    """The table `print(plan)` shows; columns that would say nothing are left out."""
    rows = list(zip(*build_plan_columns(plan), strict=True))
    return "\n".join([format_table(rows), "", *format_summary(plan)])


def build_plan_columns(plan: Plan) -> list[tuple[str, ...]]:
    """Heading and cells of each column that says something of this plan."""
    return [column for column in _columns(plan) if column]


def _columns(plan: Plan) -> list[tuple[str, ...]]:
    """The same; empty for what no stage of the plan has."""
    stages = plan.stages
    has_replicas = any(stage.replicas > 1 for stage in stages)
    recomputes = any(stage.recompute != "never" for stage in stages)
    return [
        ("stage", *(str(index) for index in range(len(stages)))),
        ("device", *(_devices(stage) for stage in stages)),
        ("replicas", *(str(stage.replicas) for stage in stages)) if has_replicas else (),
        ("layers", *(str(stage.num_layers) for stage in stages)),
        ("forward", *(format_time(stage.forward_time_s) for stage in stages)),
        ("backward", *(format_time(stage.backward_time_s) for stage in stages)),
        ("recompute", *(stage.recompute.replace("_", " ") for stage in stages))
        if recomputes
        else (),
        ("in flight", *(str(stage.in_flight) for stage in stages)),
        ("memory", *(format_bytes(stage.memory.total_bytes) for stage in stages)),
        ("limit", *(_limit(stage) for stage in stages)),
        ("used", *(_used(stage) for stage in stages)),
        (
            "sends",
            *(
                format_bytes(stage.send_forward_bytes + stage.send_backward_bytes)
                for stage in stages
            ),
        ),
        ("sync", *(format_time(stage.sync_time_s) for stage in stages)) if has_replicas else (),
        ("from", *(stage.layer_names[0] for stage in stages)),
        ("to", *(stage.layer_names[-1] for stage in stages)),
    ]


def _devices(stage: Stage) -> str:
    """Names of one or two devices, else the first and the last."""
    names = stage.devices
    return ",".join(names) if len(names) < 3 else f"{names[0]}..{names[-1]}"


def _limit(stage: Stage) -> str:
    return "none" if stage.memory_limit_bytes is None else format_bytes(stage.memory_limit_bytes)


def _used(stage: Stage) -> str:
    limit = stage.memory_limit_bytes
    return f"{stage.memory.total_bytes / limit:.0%}" if limit else ""


def format_summary(plan: Plan) -> list[str]:
    """Step time, other splits, the proof and notes, a line each."""
    lines = [
        f"step time {format_time(plan.step_time_s)} ({plan.schedule}, "
        f"{count(plan.num_microbatches, 'micro-batch')}, {_source(plan)}), "
        f"bubble {plan.bubble_fraction:.1%}",
        *_past_stages(plan),
        *(_gain(plan.step_time_s, baseline) for baseline in plan.baselines),
        *format_proof(plan),
        *(f"note: {note}" for note in plan.notes),
    ]
    return [sanitize(line) for line in lines]


def _past_stages(plan: Plan) -> list[str]:
    """What goes straight from a stage to one further on, both ways; not among what stages send."""
    sends = [
        f"{send.source} to {send.target} {format_bytes(send.forward_bytes + send.backward_bytes)}"
        for send in plan.direct_sends
    ]
    if not sends:
        return []
    more = f" and {len(sends) - MAX_COUNTS} more" if len(sends) > MAX_COUNTS else ""
    return [f"sent past other stages: {', '.join(sends[:MAX_COUNTS])}{more}"]


def _source(plan: Plan) -> str:
    """What the times come from, and how far off they may be where that is known."""
    if not plan.estimated:
        return "MEASURED profile"
    if plan.error_band is None:
        return "ESTIMATED profile"
    return f"ESTIMATED profile, expect an error of {plan.error_band:.0%}"


def format_proof(plan: Plan) -> list[str]:
    """How good the plan is by its objective, and how good its simulated step."""
    proof, objective = plan.proof, plan.options.objective
    value = format_objective(objective, proof.value)
    if proof.status == "optimal":
        verdict = "optimal by its objective"
    elif proof.lower_bound > 0:
        bound = format_objective(objective, proof.lower_bound)
        verdict = f"within {_percent(proof.gap)} of the best possible ({bound}) by its objective"
    else:
        verdict = "nothing is known of other plans by its objective"
    lines = [f"proof: {verdict}, the {proof.objective}: {value}"]
    if proof.best_value is not None and proof.best_value < proof.value:
        least = format_objective(objective, proof.best_value)
        lines.append(
            f"proof: the least objective found, {least}, is within {_percent(proof.search_gap)} "
            "of the best possible; that plan takes longer in the simulator"
        )
    bound_s = proof.simulated_lower_bound_s
    if bound_s > 0 and objective not in NOT_TIMES:
        near = f"within {_percent(plan.simulated_gap)} of" if plan.simulated_gap > 1e-9 else "at"
        lines.append(
            f"proof: simulated step {near} what no plan can beat, "
            f"{format_time(min(bound_s, plan.step_time_s))}"
        )
    return lines


def format_objective(objective: Objective, value: float) -> str:
    """A value of an objective, in its unit."""
    if objective in ("memory", "balance_size"):
        return format_bytes(value)
    if objective == "devices":
        return f"{value:.0f}"
    return format_time(value)


def _percent(share: float) -> str:
    """Rounded up, so that what is claimed is true."""
    return f"{math.ceil(share * 1e4 - 1e-6) / 100:.2f} %"


def _gain(step_time_s: float, baseline: Baseline) -> str:
    """How the plan compares with another split."""
    what = f"{BASELINE_NAMES.get(baseline.name, baseline.name)} {_split(baseline)}"
    other_s = baseline.step_time_s
    if other_s is None:
        return f"{what} cannot be used{': ' if baseline.reason else ''}{baseline.reason}"
    return f"{what}: {format_time(other_s)}; this plan {_compared(step_time_s, other_s)}"


def _compared(step_time_s: float, other_s: float) -> str:
    """One time against another: in percent, from twice the time on in multiples."""
    faster, slower = sorted((step_time_s, other_s))
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
