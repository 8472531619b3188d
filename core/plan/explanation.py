"""Explanation of a plan: its bottleneck, the gain of changes, and other partitioning rules."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ..document import Record
from ..text_table import format_table
from ..units import format_time

Bound = Literal["work", "fill", "links", "gradients", "memory"]


class Shares(Record):
    """Breakdown of the step time into four shares that add up to 1.

    Attributes:
        work: Computation of the busiest device.
        fill: The remainder: filling and draining the pipeline, and waiting for other stages.
        links: Reduction of the step if messages took no time.
        gradients: Reduction of the step if gradient synchronisation took no time.
    """

    work: float = Field(ge=0, le=1)
    fill: float = Field(ge=0, le=1)
    links: float = Field(ge=0, le=1)
    gradients: float = Field(ge=0, le=1)


class Alternative(Record):
    """The plan for a request with one change.

    Attributes:
        text: The change in words.
        num_microbatches: Micro-batches of its step.
        step_time_s: `None` if no plan was found.
        time_per_sample_s: Step time per sample; per micro-batch if their size is unknown.
        gain: Share of the time per sample that the change saves.
        proven: Whether the search finished with a proof. If not, the step time is an upper bound
            and the gain a lower bound.
        unit: Resource that the change adds, e.g. ``device``; empty if none.
        saved_s_per_unit: Reduction of the step time per unit of that resource.
    """

    text: str
    num_microbatches: int = Field(ge=1)
    step_time_s: float | None = None
    time_per_sample_s: float | None = None
    gain: float | None = None
    proven: bool = False
    unit: Literal["device", "GiB", ""] = ""
    saved_s_per_unit: float | None = None


class RuleComparison(Record):
    """The profile split by a published rule on as many devices, priced by the same simulator.

    Attributes:
        name: Name of the rule.
        balance: Layers per stage; empty if the rule yields no split.
        replicas: Devices per stage.
        step_time_s: `None` if the split cannot be used.
        ratio: Its step time divided by the plan's.
        reason: Why it cannot be used, or why the planner could not choose it.
    """

    name: str
    balance: tuple[int, ...] = ()
    replicas: tuple[int, ...] = ()
    step_time_s: float | None = None
    ratio: float | None = None
    reason: str = ""


class Explanation(Record):
    """Bottleneck analysis of a plan.

    Attributes:
        step_time_s: The plan's step time.
        num_microbatches: The plan's micro-batches per step.
        microbatch_size: Samples per micro-batch; `None` if the profile does not say.
        time_per_sample_s: See `Alternative`.
        bound: The bottleneck: the largest of `shares`, or ``memory`` if planning without memory
            limits would save over 1 % and more than free links or gradient sums would.
        reason: The bottleneck in words, with its numbers.
        shares: Breakdown of the step time.
        bubble: Idle share of the used devices' time.
        busiest_stage: Stage whose device computes longest.
        busiest_link: Stage before the cut that sends longest; `None` for a single stage.
        link_busy: Share of the step during which that cut is sending, both ways.
        memory_used: Largest share of its memory limit that any device needs; `None` without limits.
        unlimited_step_time_s: Step time planned without memory limits; `None` if there are none.
        unlimited_proven: As `Alternative.proven`.
    """

    step_time_s: float = Field(ge=0)
    num_microbatches: int = Field(ge=1)
    microbatch_size: int | None = None
    time_per_sample_s: float = Field(ge=0)
    bound: Bound
    reason: str
    shares: Shares
    bubble: float = Field(ge=0, le=1)
    busiest_stage: int = Field(ge=0)
    busiest_link: int | None = None
    link_busy: float = Field(0.0, ge=0)
    memory_used: float | None = None
    unlimited_step_time_s: float | None = None
    unlimited_proven: bool = False
    alternatives: tuple[Alternative, ...] = ()
    comparisons: tuple[RuleComparison, ...] = ()

    def __str__(self) -> str:
        return format_explanation(self)


NOT_PROVEN = (
    "at most, at least: the search hit its time limit, or has no proof for this schedule; a longer "
    "search may find better plans"
)


def format_explanation(explanation: Explanation) -> str:
    """Format an explanation as `print(explanation)` shows it."""
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
        table = format_table([headings, *map(_alternative, explanation.alternatives)])
        if any(entry.step_time_s and not entry.proven for entry in explanation.alternatives):
            table += f"\n{NOT_PROVEN}"
        blocks.append(table)
    if explanation.comparisons:
        titles = ("others", "step time", "compared", "layers", "replicas", "remark")
        blocks.append(format_table([titles, *map(_comparison, explanation.comparisons)]))
    return "\n\n".join(blocks)


def _alternative(entry: Alternative) -> tuple[str, ...]:
    if entry.step_time_s is None or entry.time_per_sample_s is None or entry.gain is None:
        return (entry.text, "no plan found", "", "", "")
    price = entry.saved_s_per_unit
    # An unproven step is an upper bound, and what it saves therefore a lower one.
    most, least = ("", "") if entry.proven else ("at most ", "at least ")
    return (
        entry.text,
        most + format_time(entry.step_time_s),
        most + format_time(entry.time_per_sample_s),
        f"{least}{entry.gain:.1%}",
        "" if price is None else f"{least}{format_time(price)} per step and {entry.unit}",
    )


def _comparison(entry: RuleComparison) -> tuple[str, ...]:
    balance = _few(entry.balance)
    replicas = _few(entry.replicas) if max(entry.replicas, default=1) > 1 else ""
    if entry.step_time_s is None or entry.ratio is None:
        return (entry.name, "none", "", balance, replicas, f"cannot be used: {entry.reason}")
    ratio = f"x {entry.ratio:.2f}"
    return (entry.name, format_time(entry.step_time_s), ratio, balance, replicas, entry.reason)


def _few(numbers: tuple[int, ...]) -> str:
    """Format the first dozen of a list of numbers."""
    most = 12
    words = ", ".join(map(str, numbers[:most]))
    return f"[{words}, ...]" if len(numbers) > most else f"[{words}]" if numbers else ""
