"""A plan's timeline as a picture: one row a stage, true widths, idle time left open."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from ..core.plan import Plan
from ..core.schedule import Work
from ..core.timeline import Timeline, TimelineEvent
from ..core.units import format_time

LABEL_WIDTH, CHART_WIDTH, MARGIN = 190, 760, 24
TOP, ROW_HEIGHT, ROW_GAP, BOTTOM = 64, 26, 6, 36
DIGIT_WIDTH = 7.0

STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #1f2328 }
  .title { font-weight: 600; font-size: 14px }
  .soft { fill: #57606a }
  .number { font-size: 11px; fill: #fff; text-anchor: middle }
  .idle { fill: #eaeef2 } .axis { stroke: #afb8c1 } .back { fill: #fff }
  .forward { fill: #0969da } .backward { fill: #1a7f37 } .reduce { fill: #9a6700 }
  .forward, .backward, .reduce { stroke: #fff; stroke-width: 0.6 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .soft { fill: #9198a1 } .number { fill: #fff }
    .idle { fill: #262c36 } .axis { stroke: #3d444d } .back { fill: #0d1117 }
    .forward { fill: #1f6feb } .backward { fill: #238636 } .reduce { fill: #9e6a03 }
    .forward, .backward, .reduce { stroke: #0d1117 }
  }
"""

COLOURS = {Work.FORWARD: "forward", Work.BACKWARD: "backward", "reduce": "reduce"}


def timeline_svg(plan: Plan, timeline: Timeline) -> str:
    """An SVG document that stands alone and follows the reader's light or dark theme.

    Args:
        plan: Names the rows.
        timeline: Of that plan, simulated or measured; rank r is stage r. Messages are not drawn.
    """
    height = TOP + timeline.num_ranks * (ROW_HEIGHT + ROW_GAP) + BOTTOM
    width = MARGIN + LABEL_WIDTH + CHART_WIDTH + MARGIN
    title = (
        f"{plan.model or 'Model'}: {plan.num_stages} stage{'s' * (plan.num_stages > 1)}, "
        f"{plan.schedule}, {plan.num_microbatches} micro-batches"
    )
    facts = (
        f"step {format_time(timeline.step_time_s)}, bubble {timeline.bubble_fraction:.1%}, "
        f"{timeline.source} from {'an ESTIMATED' if plan.estimated else 'a MEASURED'} profile"
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-labelledby="title">',
        f'<title id="title">{escape(title)}; {escape(facts)}</title>',
        f"<style>{STYLE}</style>",
        f'<rect class="back" width="{width}" height="{height}"/>',
        f'<text class="title" x="{MARGIN}" y="24">{escape(title)}</text>',
        f'<text class="soft" x="{MARGIN}" y="44">{escape(facts)}</text>',
        *_legend(width, "reduce" in {event.kind for event in timeline.events}),
        *_rows(plan, timeline),
        *_axis(timeline.step_time_s, height - BOTTOM),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _legend(width: int, reduces: bool) -> Iterator[str]:
    entries = ["forward", "backward", *(["reduce"] if reduces else []), "idle"]
    for place, name in enumerate(reversed(entries)):
        x = width - MARGIN - 84 * (place + 1)
        yield f'<rect class="{name}" x="{x}" y="34" width="12" height="12"/>'
        yield f'<text x="{x + 18}" y="44">{name}</text>'


def _rows(plan: Plan, timeline: Timeline) -> Iterator[str]:
    """A label, an idle band and the boxes of each rank."""
    x = MARGIN + LABEL_WIDTH
    for rank in range(timeline.num_ranks):
        y = TOP + rank * (ROW_HEIGHT + ROW_GAP)
        if rank < plan.num_stages:
            stage = plan.stages[rank]
            plural = "s" if stage.num_layers > 1 else ""
            label = f"{rank}  {stage.devices[0]}, {stage.num_layers} layer{plural}"
            yield f'<text x="{MARGIN}" y="{y + 17}">{escape(_shortened(label))}</text>'
        yield f'<rect class="idle" x="{x}" y="{y}" width="{CHART_WIDTH}" height="{ROW_HEIGHT}"/>'
    for event in timeline.events:
        yield from _box(event, timeline.step_time_s)


def _shortened(label: str) -> str:
    most = int(LABEL_WIDTH / DIGIT_WIDTH) - 1
    return label if len(label) <= most else label[: most - 1] + "…"


def _box(event: TimelineEvent, step_time_s: float) -> Iterator[str]:
    colour = COLOURS.get(event.kind)
    if colour is None or step_time_s <= 0:
        return
    x = MARGIN + LABEL_WIDTH + CHART_WIDTH * event.start_s / step_time_s
    y = TOP + event.rank * (ROW_HEIGHT + ROW_GAP)
    width = CHART_WIDTH * (event.end_s - event.start_s) / step_time_s
    yield f'<rect class="{colour}" x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW_HEIGHT}"/>'
    number = str(event.microbatch)
    if colour != "reduce" and width > DIGIT_WIDTH * len(number) + 2:
        yield f'<text class="number" x="{x + width / 2:.2f}" y="{y + 17}">{number}</text>'


def _axis(step_time_s: float, y: int) -> Iterator[str]:
    """A line with a tick at every round number of seconds."""
    x = MARGIN + LABEL_WIDTH
    yield f'<line class="axis" x1="{x}" y1="{y}" x2="{x + CHART_WIDTH}" y2="{y}"/>'
    if step_time_s <= 0:
        return
    each_s = _round_interval(step_time_s / 6)
    for tick in range(math.floor(step_time_s / each_s) + 1):
        at = x + CHART_WIDTH * tick * each_s / step_time_s
        label = format_time(tick * each_s) if tick else "0"
        yield f'<line class="axis" x1="{at:.2f}" y1="{y}" x2="{at:.2f}" y2="{y + 5}"/>'
        yield f'<text class="soft" x="{at:.2f}" y="{y + 19}" text-anchor="middle">{label}</text>'


def _round_interval(at_least_s: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(at_least_s))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= at_least_s)
