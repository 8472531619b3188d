"""Notebook display of a plan: a step as a picture, the stages as a table, no scripts."""

from __future__ import annotations

import base64
from html import escape

from ..core.plan.plan import Plan
from ..core.plan.table import build_plan_columns, format_summary
from ..core.text_table import sanitize
from ..formats.svg import timeline_svg
from ..planner.simulator.plan_timeline import plan_timeline

MAX_BOXES = 6000
"""A picture of more would weigh megabytes in the notebook."""


def plan_html(plan: Plan) -> str:
    """Render the HTML a notebook shows for a plan: the text of `print` and its timeline."""
    heading, *rows = zip(*build_plan_columns(plan), strict=True)
    table = "".join(_row(cells, "td") for cells in rows)
    lines = "".join(f"<li>{escape(line)}</li>" for line in format_summary(plan))
    title = escape(sanitize(plan.model) or "Plan")
    return (
        f"<div><strong>{title}</strong>{_picture(plan)}"
        f"<table>{_row(heading, 'th')}{table}</table><ul>{lines}</ul></div>"
    )


def _row(cells: tuple[str, ...], tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(sanitize(cell))}</{tag}>" for cell in cells) + "</tr>"


def _picture(plan: Plan) -> str:
    """Embed the timeline as an image, which keeps its styles apart from the notebook's."""
    if 2 * plan.num_stages * plan.num_microbatches > MAX_BOXES:
        return "<p>too large to be drawn here: stagewright show plan.json --html plan.html</p>"
    # As an <img>, because an inline <style> would apply to the whole notebook page.
    svg = timeline_svg(plan, plan_timeline(plan)).encode()
    text = base64.b64encode(svg).decode()
    words = escape(f"one step of {sanitize(plan.model) or 'the plan'}, a row a device", quote=True)
    return f'<p><img alt="{words}" src="data:image/svg+xml;base64,{text}"></p>'
