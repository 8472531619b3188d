"""Explanation of a plan: its bottleneck, the gain of changes, and other partitioning rules."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ..document import Name, Record
from ..text_table import format_table
from ..units import format_bytes, format_time

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


class Dimension(Record):
    """Gain of a plan by one of its dimensions, against a plan with less of it.

    Differences are the plan's figure less the other's; those of times add up to that of the steps.

    Attributes:
        text: The two values, such as ``tensor 4 instead of 2``.
        step_time_s: Step of the other plan; `None` if there is none.
        compute_s: Work of the busiest device, without collectives.
        all_reduce_s: Collectives of its split layers.
        waiting_s: Filling, draining and waiting.
        messages_s: Messages between stages.
        gradients_s: Summing gradients.
        memory_bytes: Memory of the fullest device.
    """

    text: str
    step_time_s: float | None = None
    compute_s: float = 0.0
    all_reduce_s: float = 0.0
    waiting_s: float = 0.0
    messages_s: float = 0.0
    gradients_s: float = 0.0
    memory_bytes: int = 0


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
        busiest_device: Device that computes longest, over all of its stages.
        busiest_stage: The stage on which it spends most time.
        busiest_stage_work: Share of the step that this stage computes on it.
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
    busiest_device: Name
    busiest_stage: int = Field(ge=0)
    busiest_stage_work: float = Field(ge=0, le=1)
    busiest_link: int | None = None
    link_busy: float = Field(0.0, ge=0)
    memory_used: float | None = None
    unlimited_step_time_s: float | None = None
    unlimited_proven: bool = False
    alternatives: tuple[Alternative, ...] = ()
    dimensions: tuple[Dimension, ...] = ()
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
    if explanation.dimensions:
        blocks.append("\n".join(_dimension(each, explanation) for each in explanation.dimensions))
    if explanation.comparisons:
        titles = ("others", "step time", "compared", "layers", "replicas", "remark")
        blocks.append(format_table([titles, *map(_comparison, explanation.comparisons)]))
    return "\n\n".join(blocks)


LEAST_SHOWN = 1e-3
"""Share of the step below which a difference is not worth a word."""


def _dimension(entry: Dimension, explanation: Explanation) -> str:
    """Format one dimension: ``tensor 4 instead of 2: +11 ms of all-reduce, -38 ms of compute``."""
    if entry.step_time_s is None:
        return f"{entry.text}: without it no plan was found"
    parts = (
        (entry.all_reduce_s, "of all-reduce"),
        (entry.compute_s, "of compute"),
        (entry.waiting_s, "of waiting"),
        (entry.messages_s, "of messages"),
        (entry.gradients_s, "of gradient sums"),
    )
    step_s = explanation.step_time_s
    shown = [
        f"{_sign(value)}{format_time(abs(value))} {what}"
        for value, what in parts
        if abs(value) > LEAST_SHOWN * step_s
    ]
    size = entry.memory_bytes
    shown += [f"{_sign(size)}{format_bytes(abs(size))}"] if size else []
    change = step_s - entry.step_time_s
    total = f"{_sign(change)}{format_time(abs(change))}"
    return f"{entry.text}: {', '.join(shown) or 'no difference'}; the step {total}"


def _sign(value: float) -> str:
    return "+" if value > 0 else "\N{MINUS SIGN}"


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
