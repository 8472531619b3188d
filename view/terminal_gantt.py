"""A step in a terminal: a line a device, a character a stretch of time."""

from __future__ import annotations

from rich.text import Text

from ..core.text_table import sanitize
from ..core.units import format_time
from .plan_view import Boxes, PlanView

STYLES = {
    "F": "white on blue",
    "B": "white on green",
    "I": "white on green",
    "W": "white on magenta",
    "R": "white on bright_black",
    "sync": "black on yellow",
    "reduce": "black on yellow",
}
"""Colour of each kind of work; transfers are not drawn."""

MAX_LANES = 64


def gantt_text(view: PlanView, width: int) -> Text:
    """Draw the lanes of a step as wide as the terminal, ``width`` characters with labels.

    A character has the colour and letter of the work that takes most of its time; ``.`` is idle.
    """
    labels = [
        f"{'+'.join(map(str, lane.stages))} {sanitize(lane.device)}"[:16] for lane in view.lanes
    ]
    left = max(map(len, labels)) + 1
    columns = max(10, width - left)
    text = Text(no_wrap=True)
    if view.boxes is None or not view.header.step_time_s:
        return text
    for rank, row in enumerate(_rows(view.boxes, len(labels), columns, view.header.step_time_s)):
        if rank == MAX_LANES:
            text.append(f"and {len(labels) - MAX_LANES} more devices\n")
            break
        text.append(labels[rank].ljust(left))
        for kind in row:
            text.append(kind[:1].upper() if kind else ".", STYLES.get(kind, "bright_black"))
        text.append("\n")
    end = format_time(view.header.step_time_s)
    text.append(" " * left + "0" + end.rjust(columns - 1))
    return text


def _rows(boxes: Boxes, num_lanes: int, columns: int, length_s: float) -> list[list[str]]:
    """Return for each lane and column the kind that fills most of it; empty for idle."""
    each_s = length_s / columns
    taken: list[list[dict[str, float]]] = [[{} for _ in range(columns)] for _ in range(num_lanes)]
    parts = zip(boxes.ranks, boxes.kinds, boxes.start_s, boxes.end_s, strict=True)
    for rank, kind, start_s, end_s in parts:
        if kind not in STYLES:
            continue
        # Rounding may put the step's very end one column past the last.
        first = min(columns - 1, int(start_s / each_s))
        last = min(columns - 1, int(end_s / each_s))
        for column in range(first, last + 1):
            begin_s = column * each_s
            within_s = min(end_s, begin_s + each_s) - max(start_s, begin_s)
            cell = taken[rank][column]
            cell[kind] = cell.get(kind, 0.0) + max(0.0, within_s)
    return [[_most(cell, each_s) for cell in row] for row in taken]


def _most(cell: dict[str, float], each_s: float) -> str:
    """Return the kind that takes most of a column, or empty if it is mostly idle."""
    if not cell:
        return ""
    kind = max(cell, key=lambda name: cell[name])
    return kind if sum(cell.values()) >= each_s / 2 else ""
