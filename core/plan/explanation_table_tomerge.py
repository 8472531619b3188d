"""An explanation as plain text: what binds, then what changes buy, then what others do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..text_table import text_table
from ..units import format_time

if TYPE_CHECKING:
    from .explanation import Alternative, Comparison, Explanation


NOT_PROVEN = (
    "at most, at least: the search was cut short, or its schedule has no proof; a longer one may "
    "find better"
)


def explanation_table(explanation: Explanation) -> str:
    """What `print(explanation)` shows."""
    shares = explanation.shares
    blocks = [
        "\n".join(
            [
                f"step time {format_time(explanation.step_time_s)}: {explanation.reason}",
                f"of the step: {shares.work:.1%} work of the busiest device, {shares.fill:.1%} "
                f"filling, draining and waiting, {shares.links:.1%} messages, "
                f"{shares.gradients:.1%} summing gradients; bubble {explanation.bubble:.1%}",
            ]
        )
    ]
    if explanation.alternatives:
        each = "micro-batch" if explanation.microbatch_size is None else "sample"
        headings = ("change", "step time", f"per {each}", "gain", "worth")
        table = text_table([headings, *map(_alternative, explanation.alternatives)])
        if any(entry.step_time_s and not entry.proven for entry in explanation.alternatives):
            table += f"\n{NOT_PROVEN}"
        blocks.append(table)
    if explanation.comparisons:
        titles = ("others", "step time", "compared", "layers", "replicas", "remark")
        blocks.append(text_table([titles, *map(_comparison, explanation.comparisons)]))
    return "\n\n".join(blocks)


def _alternative(entry: Alternative) -> tuple[str, ...]:
    if entry.step_time_s is None or entry.time_per_sample_s is None or entry.gain is None:
        return (entry.text, "no plan found", "", "", "")
    price = entry.saved_s_per_unit
    most, least = ("", "") if entry.proven else ("at most ", "at least ")
    return (
        entry.text,
        most + format_time(entry.step_time_s),
        most + format_time(entry.time_per_sample_s),
        f"{least}{entry.gain:.1%}",
        "" if price is None else f"{least}{format_time(price)} a step for each {entry.unit}",
    )


def _comparison(entry: Comparison) -> tuple[str, ...]:
    balance = _few(entry.balance)
    replicas = _few(entry.replicas) if max(entry.replicas, default=1) > 1 else ""
    if entry.step_time_s is None or entry.ratio is None:
        return (entry.name, "none", "", balance, replicas, f"cannot be used: {entry.reason}")
    ratio = f"x {entry.ratio:.2f}"
    return (entry.name, format_time(entry.step_time_s), ratio, balance, replicas, entry.reason)


def _few(numbers: tuple[int, ...]) -> str:
    """The first numbers; a pipeline may have hundreds of stages."""
    most = 12
    words = ", ".join(map(str, numbers[:most]))
    return f"[{words}, ...]" if len(numbers) > most else f"[{words}]" if numbers else ""
