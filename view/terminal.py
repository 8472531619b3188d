"""A plan's step and tables of plans and profiles, no wider than the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from io import StringIO
from typing import Literal

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..core.plan.plan import Plan
from ..core.plan.table import build_plan_columns, format_summary
from ..core.profile.profile import Profile
from ..core.profile.table import build_profile_rows, format_profile_details
from ..core.text_table import is_numeric, sanitize
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


PLAN_COLUMNS = (
    "to", "from", "sync", "sends back", "sends on", "used", "in flight", "recompute", "limit",
    "strategy", "tensor", "replicas", "device", "backward",
)  # fmt: skip
"""Columns in the order they are dropped where room is short; the others always stay."""

PROFILE_COLUMNS = ("memory", "activations", "parameters", "time", "")
"""Columns of a profile in the order they are dropped."""

NAMES = ("device", "from", "to", "layer")
MARKS = ""
"""Heading of the remarks column; remarks are cut at their end."""
NAME_WIDTHS = (64, 32, 24, 16, 10)
"""Lengths that names are cut to, tried in this order before a column is dropped."""

GAP = 2
INDENT = 2

Column = tuple[str, ...]


def fit_plan_table(
    plan: Plan, width: int, spelled: Callable[[str], str] = str, *, details: bool = False
) -> str:
    """Write what ``print(plan)`` shows in lines of at most ``width`` characters.

    Each sentence is ``spelled`` before it is wrapped; ``details`` adds the proof's.
    """
    sentences = map(spelled, format_summary(plan, details=details))
    return _written(build_plan_columns(plan), PLAN_COLUMNS, sentences, width)


def fit_profile_table(
    profile: Profile, width: int, *, tree: bool = True, depth: int | None = None
) -> str:
    """Write what ``print(profile)`` shows in lines of at most ``width`` characters."""
    columns = list(zip(*build_profile_rows(profile, tree=tree, depth=depth), strict=True))
    return _written(columns, PROFILE_COLUMNS, format_profile_details(profile), width)


def _written(
    columns: Sequence[Column], dropped: Sequence[str], sentences: Iterable[str], width: int
) -> str:
    written = StringIO()
    console = Console(file=written, width=width, color_system=None)
    console.print(_table(_fitting(columns, dropped, width)))
    console.print()
    for sentence in sentences:
        for number, line in enumerate(Text(sentence).wrap(console, width - INDENT)):
            console.print(Text(" " * (INDENT if number else 0)).append_text(line))
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())


def _fitting(columns: Sequence[Column], dropped: Sequence[str], width: int) -> list[Column]:
    """Choose the columns that fit and shorten names as little as possible."""
    shown = list(columns)
    for heading in (None, *dropped):
        shown = [column for column in shown if column[0] != heading]
        for most in NAME_WIDTHS:
            cut = [_cut(column, most) for column in shown]
            if sum(max(map(cell_len, column)) + GAP for column in cut) - GAP <= width:
                return cut
    return cut


def _cut(column: Column, most: int) -> Column:
    cells = map(sanitize, column)
    if column[0] == MARKS:
        return tuple(_start(cell, most) for cell in cells)
    return tuple(_end(cell, most) for cell in cells) if column[0] in NAMES else tuple(cells)


def _end(name: str, most: int) -> str:
    """Keep the end of a long name, which tells more than its beginning, and its indentation."""
    if cell_len(name) <= most:
        return name
    short = name.lstrip(" ")
    inset = " " * min(len(name) - len(short), most // 2)
    while cell_len(short) > most - 1 - len(inset):
        short = short[1:]
    return f"{inset}…{short}"


def _start(remark: str, most: int) -> str:
    text = Text(remark)
    text.truncate(most, overflow="ellipsis")
    return text.plain


def _table(columns: Sequence[Column]) -> Table:
    made = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), show_header=False)
    for column in columns:
        justify: Literal["left", "right"] = "right" if is_numeric(column[1:]) else "left"
        made.add_column(no_wrap=True, overflow="ellipsis", justify=justify)
    heading, *rows = zip(*columns, strict=True)
    rule = ["-" * max(map(cell_len, column)) for column in columns]
    for row in (heading, rule, *rows):
        made.add_row(*map(Text, row))
    return made
