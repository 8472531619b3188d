"""A plan as plain text: one row a stage, then what the step will be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .units import format_bytes, format_time

if TYPE_CHECKING:
    from .plan import Plan, Stage

HEADINGS = (
    "stage", "device", "layers", "forward", "backward", "memory", "limit", "sends", "from", "to",
)  # fmt: skip


def plan_table(plan: Plan) -> str:
    """The table `print(plan)` shows."""
    rows = [HEADINGS, *(_row(index, stage) for index, stage in enumerate(plan.stages))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([*lines, "", *summary_lines(plan)])


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
        balance = list(equal.balance)
        if equal.step_time_s is None:
            lines.append(f"equal layer counts {balance} do not fit the devices' memory")
        else:
            gain = equal.step_time_s / plan.step_time_s - 1 if plan.step_time_s else 0.0
            lines.append(
                f"equal layer counts {balance}: {format_time(equal.step_time_s)}; "
                f"this plan is {gain:.1%} faster"
            )
    proof = plan.proof
    lines.append(
        f"proof: {proof.status}, {proof.objective} {format_time(proof.value)}, "
        f"lower bound {format_time(proof.lower_bound)} (gap {proof.gap:.2%})"
    )
    return lines
