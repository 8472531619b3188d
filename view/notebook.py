"""A plan in a notebook: one step as a picture, the stages as a table; no program runs."""

from __future__ import annotations

import base64
from html import escape

from ..core.plan.plan import Plan
from ..core.plan.table import plan_columns, summary_lines
from ..core.text_table import printable
from ..formats.svg import timeline_svg
from ..planner.simulator.plan_timeline import plan_timeline

MAX_BOXES = 6000
"""A picture of more would weigh megabytes in the notebook."""


def plan_html(plan: Plan) -> str:
    """HTML that notebooks show for a plan: what `print` says, with its timeline drawn."""
    heading, *rows = zip(*plan_columns(plan), strict=True)
    table = "".join(_row(cells, "td") for cells in rows)
    lines = "".join(f"<li>{escape(line)}</li>" for line in summary_lines(plan))
    title = escape(printable(plan.model) or "Plan")
    return (
        f"<div><strong>{title}</strong>{_picture(plan)}"
        f"<table>{_row(heading, 'th')}{table}</table><ul>{lines}</ul></div>"
    )


def _row(cells: tuple[str, ...], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(printable(cell))}</{tag}>" for cell in cells) + "</tr>"


def _picture(plan: Plan) -> str:
    """The timeline as an image, so that its styles stay its own."""
    if 2 * plan.num_stages * plan.num_microbatches > MAX_BOXES:
        return "<p>too large to be drawn here: stagewright show plan.json --html plan.html</p>"
    svg = timeline_svg(plan, plan_timeline(plan)).encode()
    text = base64.b64encode(svg).decode()
    words = escape(f"one step of {printable(plan.model) or 'the plan'}, a row a device", quote=True)
    return f'<p><img alt="{words}" src="data:image/svg+xml;base64,{text}"></p>'
