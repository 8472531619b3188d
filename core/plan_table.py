"""A plan as plain text: one row a stage, then what the step will be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .text_table import text_table
from .units import format_bytes, format_time

if TYPE_CHECKING:
    from .plan import Plan, Stage

HEADINGS = (
    "stage", "device", "layers", "forward", "backward", "memory", "limit", "used", "sends", "from",
    "to",
)  # fmt: skip


def plan_table(plan: Plan) -> str:
    """The table `print(plan)` shows."""
    rows = [HEADINGS, *(_row(index, stage) for index, stage in enumerate(plan.stages))]
    return "\n".join([text_table(rows), "", *summary_lines(plan)])


def _row(index: int, stage: Stage) -> tuple[str, ...]:
    limit = stage.memory_limit_bytes
    return (
        str(index),
        ",".join(stage.devices),
        str(stage.num_layers),
        format_time(stage.forward_time_s),
        format_time(stage.backward_time_s),
        format_bytes(stage.memory.total_bytes),
        "none" if limit is None else format_bytes(limit),
        f"{stage.memory.total_bytes / limit:.0%}" if limit else "",
        format_bytes(stage.send_forward_bytes + stage.send_backward_bytes),
        stage.layer_names[0],
        stage.layer_names[-1],
    )


def summary_lines(plan: Plan) -> list[str]:
    """Step time, bubble, gain and proof, a line each."""
    source = "ESTIMATED" if plan.estimated else "MEASURED"
    lines = [
        f"step time {format_time(plan.step_time_s)} ({plan.schedule}, "
        f"{plan.num_microbatches} micro-batches, {source} profile), "
        f"bubble {plan.bubble_fraction:.1%}",
    ]
    equal = plan.baseline("equal_layers")
    if equal is not None:
        lines.append(_gain(plan.step_time_s, list(equal.balance), equal.step_time_s))
    proof = plan.proof
    lines.append(
        f"proof: {proof.status} by the {proof.objective}, {format_time(proof.value)}, which no "
        f"split has below {format_time(proof.lower_bound)} (gap {proof.gap:.2%}); the step time "
        "above is simulated"
    )
    return lines


def _gain(step_time_s: float, balance: list[int], equal_s: float | None) -> str:
    """How the plan compares with equal layer counts."""
    if equal_s is None:
        return f"equal layer counts {balance} cannot be used: memory, or a cut that is not legal"
    faster, slower = sorted((step_time_s, equal_s))
    change = slower / faster - 1 if faster else 0.0
    if change < 0.0005:
        verdict = "this plan takes the same time"
    else:
        verdict = f"this plan is {change:.1%} {'faster' if step_time_s < equal_s else 'slower'}"
    return f"equal layer counts {balance}: {format_time(equal_s)}; {verdict}"
