"""A plan's timeline as a picture: one row a rank, true widths, idle time left open."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from html import escape

from ..core.plan.plan import Plan
from ..core.plan.schedule import Schedule, Work
from ..core.plan.timeline import Timeline, TimelineEvent
from ..core.text_table import sanitize
from ..core.units import format_time
from ..schedules.layout import Layout, lay_out

LABEL_WIDTH, CHART_WIDTH, MARGIN = 190, 760, 24
TOP, ROW_HEIGHT, ROW_GAP, BOTTOM = 64, 26, 6, 36
PANEL_GAP = 18
DIGIT_WIDTH = 7.0

STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #1f2328 }
  .title { font-weight: 600; font-size: 14px }
  .soft { fill: #57606a }
  .number { font-size: 11px; fill: #fff; text-anchor: middle }
  .idle { fill: #eaeef2 } .axis { stroke: #afb8c1 } .back { fill: #fff }
  .forward { fill: #0969da } .backward { fill: #1a7f37 } .reduce, .sync { fill: #9a6700 }
  .inputs { fill: #1a7f37 } .weights { fill: #8250df } .recompute { fill: #57606a }
  .forward, .backward, .inputs, .weights, .recompute, .reduce { stroke: #fff; stroke-width: 0.6 }
  .odd { fill-opacity: 0.72 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .soft { fill: #9198a1 } .number { fill: #fff }
    .idle { fill: #262c36 } .axis { stroke: #3d444d } .back { fill: #0d1117 }
    .forward { fill: #1f6feb } .backward { fill: #238636 } .reduce, .sync { fill: #9e6a03 }
    .inputs { fill: #238636 } .weights { fill: #8957e5 } .recompute { fill: #6e7681 }
    .forward, .backward, .inputs, .weights, .recompute, .reduce { stroke: #0d1117 }
  }
"""

CLASSES = {
    Work.FORWARD: "forward",
    Work.BACKWARD: "backward",
    Work.BACKWARD_INPUT: "inputs",
    Work.BACKWARD_WEIGHT: "weights",
    Work.RECOMPUTE: "recompute",
    "sync": "sync",
    "reduce": "reduce",
}
"""How each kind of event is drawn; messages are not."""

SYNC_HEIGHT = 6
"""A sum over replicas is a strip at the foot of the row: the rank may compute meanwhile."""


@dataclass(frozen=True)
class _Labels:
    """Texts of a drawing.

    Attributes:
        title: Shown above, escaped where it is written.
        source: Where the times of a simulated timeline come from.
        rows: One a rank.
        paler: Ranks with the stages that are drawn paler there.
    """

    title: str
    source: str
    rows: Sequence[str]
    paler: AbstractSet[tuple[int, int]]


def timeline_svg(plan: Plan, timeline: Timeline, beside: Timeline | None = None) -> str:
    """Draw a self-contained SVG that follows the reader's light or dark theme.

    Rows are named by the plan, whose timeline it is; another one of that plan, such as the measured
    one, is drawn ``beside`` it on the same axis. Messages are not drawn. Of a rank's stages every
    other one is paler.
    """
    where = lay_out(plan)
    title = (
        f"{plan.model or 'Model'}: {plan.num_stages} stage{'s' * (plan.num_stages > 1)}"
        f"{f' on {where.num_ranks} devices' * (where.num_ranks != plan.num_stages)}, "
        f"{plan.schedule}, {plan.num_microbatches} micro-batches"
    )
    labels = _Labels(
        title,
        f"{'an ESTIMATED' if plan.estimated else 'a MEASURED'} profile",
        [_label(plan, where, rank) for rank in range(where.num_ranks)],
        {(rank, stage) for rank in range(where.num_ranks) for stage in where.stages_of(rank)[1::2]},
    )
    return _draw(labels, [timeline] if beside is None else [timeline, beside])


def schedule_svg(schedule: Schedule, timeline: Timeline) -> str:
    """Draw an order of work by itself, on a timeline simulated with equal stages."""
    ranks = range(len(schedule.ranks))
    stages = [schedule.stages_of(rank) for rank in ranks]
    labels = _Labels(
        f"{schedule.name}: {schedule.num_stages} stages on {len(ranks)} ranks, "
        f"{schedule.num_microbatches} micro-batches",
        "equal stages, forwards of 1 s and backwards of 2 s",
        [f"rank {rank}: stage {', '.join(map(str, stages[rank]))}" for rank in ranks],
        {(rank, stage) for rank in ranks for stage in stages[rank][1::2]},
    )
    return _draw(labels, [timeline])


def _draw(labels: _Labels, drawn: Sequence[Timeline]) -> str:
    length_s = max(each.step_time_s for each in drawn)
    panel = drawn[0].num_ranks * (ROW_HEIGHT + ROW_GAP)
    height = TOP + len(drawn) * panel + (len(drawn) - 1) * PANEL_GAP + BOTTOM
    width = MARGIN + LABEL_WIDTH + CHART_WIDTH + MARGIN
    # Names come from other people's documents: no control characters here, escaped below.
    title = sanitize(labels.title)
    facts = "; ".join(_facts(labels, each) for each in drawn)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" aria-labelledby="title">',
        f'<title id="title">{escape(title)}; {escape(facts)}</title>',
        f"<style>{STYLE}</style>",
        f'<rect class="back" width="{width}" height="{height}"/>',
        f'<text class="title" x="{MARGIN}" y="24">{escape(title)}</text>',
        f'<text class="soft" x="{MARGIN}" y="44">{escape(facts)}</text>',
        *_legend(width, {event.kind for each in drawn for event in each.events}),
        *(
            f'<text class="soft" x="{MARGIN}" y="{TOP - 6 + number * (panel + PANEL_GAP)}">'
            f"{'planned' if each.source == 'simulated' else 'measured'}</text>"
            for number, each in enumerate(drawn)
            if len(drawn) > 1
        ),
        *(
            line
            for number, each in enumerate(drawn)
            for line in _rows(labels, each, TOP + number * (panel + PANEL_GAP), length_s)
        ),
        *_axis(length_s, height - BOTTOM),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _facts(labels: _Labels, timeline: Timeline) -> str:
    """Write the caption, such as ``step 12 ms, bubble 8.0%, simulated from a MEASURED profile``."""
    source: str = timeline.source
    if source == "simulated":
        source += f" from {labels.source}"
    step = format_time(timeline.step_time_s)
    return f"step {step}, bubble {timeline.bubble_fraction:.1%}, {source}"


def _legend(width: int, kinds: set[str]) -> Iterator[str]:
    always = {"forward"} if kinds & {Work.BACKWARD_INPUT} else {"forward", "backward"}
    shown = always | {CLASSES[kind] for kind in kinds & CLASSES.keys()}
    entries = [*(name for name in CLASSES.values() if name in shown), "idle"]
    for place, name in enumerate(reversed(entries)):
        x = width - MARGIN - 84 * (place + 1)
        yield f'<rect class="{name}" x="{x}" y="34" width="12" height="12"/>'
        yield f'<text x="{x + 18}" y="44">{name}</text>'


def _rows(labels: _Labels, timeline: Timeline, top: int, length_s: float) -> Iterator[str]:
    x = MARGIN + LABEL_WIDTH
    for rank in range(timeline.num_ranks):
        y = top + rank * (ROW_HEIGHT + ROW_GAP)
        if rank < len(labels.rows):
            label = _shortened(sanitize(labels.rows[rank]))
            yield f'<text x="{MARGIN}" y="{y + 17}">{escape(label)}</text>'
        yield f'<rect class="idle" x="{x}" y="{y}" width="{CHART_WIDTH}" height="{ROW_HEIGHT}"/>'
    for event in timeline.events:
        odd = " odd" * ((event.rank, event.stage) in labels.paler)
        yield from _box(event, top, length_s, odd)


def _label(plan: Plan, where: Layout, rank: int) -> str:
    """Label a rank, for example ``0  device:0, 3 layers``."""
    stages = where.stages_of(rank)
    replica = where.stage_ranks[stages[0]].index(rank)
    layers = sum(plan.stages[stage].num_layers for stage in stages)
    devices = plan.stages[stages[0]].devices_of(replica)
    others = f" +{len(devices) - 1}" * (len(devices) > 1)
    return f"{'+'.join(map(str, stages))}  {devices[0]}{others}, {layers} layer{'s' * (layers > 1)}"


def _shortened(label: str) -> str:
    # Nothing here can measure text, so a digit's width stands for every character's.
    most = int(LABEL_WIDTH / DIGIT_WIDTH) - 1
    return label if len(label) <= most else label[: most - 1] + "…"


def _box(event: TimelineEvent, top: int, length_s: float, odd: str) -> Iterator[str]:
    kind = CLASSES.get(event.kind)
    if kind is None or length_s <= 0:
        return
    x = MARGIN + LABEL_WIDTH + CHART_WIDTH * event.start_s / length_s
    y = top + event.rank * (ROW_HEIGHT + ROW_GAP)
    width = CHART_WIDTH * (event.end_s - event.start_s) / length_s
    height = ROW_HEIGHT
    if kind == "sync":
        y, height = y + ROW_HEIGHT - SYNC_HEIGHT, SYNC_HEIGHT
    yield (f'<rect class="{kind}{odd}" x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}"/>')
    number = str(event.microbatch)
    if isinstance(event.kind, Work) and width > DIGIT_WIDTH * len(number) + 2:
        yield f'<text class="number" x="{x + width / 2:.2f}" y="{y + 17}">{number}</text>'


def _axis(step_time_s: float, y: int) -> Iterator[str]:
    """Draw the time axis with a tick at every round number of seconds."""
    x = MARGIN + LABEL_WIDTH
    yield f'<line class="axis" x1="{x}" y1="{y}" x2="{x + CHART_WIDTH}" y2="{y}"/>'
    if step_time_s <= 0:
        return
    # At most six intervals, so that labels do not overlap.
    each_s = _round_interval(step_time_s / 6)
    for tick in range(math.floor(step_time_s / each_s) + 1):
        at = x + CHART_WIDTH * tick * each_s / step_time_s
        label = format_time(tick * each_s) if tick else "0"
        yield f'<line class="axis" x1="{at:.2f}" y1="{y}" x2="{at:.2f}" y2="{y + 5}"/>'
        yield f'<text class="soft" x="{at:.2f}" y="{y + 19}" text-anchor="middle">{label}</text>'


def _round_interval(at_least_s: float) -> float:
    """Return the smallest of 1, 2 or 5 times a power of ten that is large enough."""
    power = 10.0 ** math.floor(math.log10(at_least_s))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= at_least_s)
