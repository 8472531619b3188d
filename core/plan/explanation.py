"""What holds a plan's step up, what changes would buy, and what others would have done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from ..document import Record
from ..text_table import format_table
from ..units import format_time

if TYPE_CHECKING:
    pass  # SELFIMPORT


Bound = Literal["work", "fill", "links", "gradients", "memory"]


class Shares(Record):
    """A step in four parts that add up to it; each as a share of it.

    Attributes:
        work: The busiest device computes.
        fill: What is left: the pipeline fills and drains, and stages wait for each other.
        links: By how much the step shortens if messages take no time.
        gradients: By how much it shortens if summing gradients takes no time.
    """

    work: float = Field(ge=0, le=1)
    fill: float = Field(ge=0, le=1)
    links: float = Field(ge=0, le=1)
    gradients: float = Field(ge=0, le=1)


class Alternative(Record):
    """The same request with one change, planned again.

    Attributes:
        text: The change in words.
        num_microbatches: Of a step then.
        step_time_s: `None` if nothing was found.
        time_per_sample_s: Of a step, by its samples where their number is known, else by its
            micro-batches.
        gain: Share of the time per sample that is saved.
        proven: Whether the search ended with its proof. If not, a longer one may find a shorter
            step: the step time is at most this, the gain at least.
        unit: What is bought, e.g. ``device``; empty if nothing is.
        saved_s_per_unit: Of the step, for one unit: the price worth paying.
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
    """The same profile split by somebody else's rule, on as many devices, by the same simulator.

    Attributes:
        name: Whose rule.
        balance: Layers of each stage; empty if the rule gives none.
        replicas: Of each stage.
        step_time_s: `None` if the split cannot be used.
        ratio: Of that step to the plan's.
        reason: Why it cannot be used, or why the plan could not have been it.
    """

    name: str
    balance: tuple[int, ...] = ()
    replicas: tuple[int, ...] = ()
    step_time_s: float | None = None
    ratio: float | None = None
    reason: str = ""


class Explanation(Record):
    """Why a plan takes as long as it does.

    Attributes:
        step_time_s: The plan's.
        num_microbatches: Likewise.
        microbatch_size: Samples of a micro-batch; `None` if the profile does not say.
        time_per_sample_s: See `Alternative`.
        bound: What holds it up most: the largest of `shares`; ``memory`` where planning without
            memory limits would save over 1 % and more than free links or gradient sums would.
        reason: The same in words, with its numbers.
        shares: Of the step.
        bubble: Idle share of all devices' time.
        busiest_stage: The one whose device computes longest.
        busiest_link: The stage in front of the cut that is sending longest; `None` for one stage.
        link_busy: Share of the step that cut is sending, both ways.
        memory_used: Largest share of its limit that any device needs; `None` without limits.
        unlimited_step_time_s: Planned without memory limits; `None` if there are none.
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
        pass  # SELFIMPORT

        return format_explanation(self)


NOT_PROVEN = (
    "at most, at least: the search was cut short, or its schedule has no proof; a longer one may "
    "find better"
)


def format_explanation(explanation: Explanation) -> str:
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
    most, least = ("", "") if entry.proven else ("at most ", "at least ")
    return (
        entry.text,
        most + format_time(entry.step_time_s),
        most + format_time(entry.time_per_sample_s),
        f"{least}{entry.gain:.1%}",
        "" if price is None else f"{least}{format_time(price)} a step for each {entry.unit}",
    )


def _comparison(entry: RuleComparison) -> tuple[str, ...]:
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
