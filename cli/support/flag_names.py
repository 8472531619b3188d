"""Translation of option fields in messages into command-line flags.

The library's messages name the fields of `PlanOptions` (``recompute='auto'``), as written in
Python and over HTTP. On the command line they become ``--recompute auto``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ...view.option_flags import FLAGS
from .output import output_width

if TYPE_CHECKING:
    from ...core.plan.plan import Plan

# In all three patterns the lookbehind spares paths, dotted names and quoted words.
_WITH_VALUE = re.compile(rf"(?<![\w/.\"'-])({'|'.join(FLAGS)})=('[^']*'|None|[\w.+-]*\w)")
"""A field with its value."""

_ALONE = re.compile(
    rf"(?<![\w/.\"'-])({'|'.join(name for name in FLAGS if '_' in name)})(?![\w='\"(])"
)
"""A field alone; not those that are English words, such as 'schedule'."""

_POINTER = re.compile(rf"(?m)^(\s*)/({'|'.join(FLAGS)})(?=[:/])")
"""A JSON pointer to an invalid field, at the start of a line."""


def in_flags(text: str) -> str:
    """Replace the fields that a message names by flags."""
    text = _WITH_VALUE.sub(_flag, text)
    return _ALONE.sub(lambda found: FLAGS[found[1]], text)


def fields_in_flags(text: str) -> str:
    """Replace the pointers to fields in an error about options by flags."""
    return _POINTER.sub(lambda found: found[1] + FLAGS[found[2]], text)


def _flag(found: re.Match[str]) -> str:
    name, value = found[1], found[2].strip("'")
    if value != "None":
        return f"{FLAGS[name]} {value}"
    return f"{FLAGS[name]} any" if name == "max_replicas" else f"no {FLAGS[name]}"


def plan_text(plan: Plan, *, details: bool = False) -> str:
    """Format a plan as ``print(plan)`` does, with flags for fields and fitted to the terminal.

    With ``details`` all that the proof says is added.
    """
    width = output_width()
    if width is not None:
        from ...view.terminal import fit_plan_table

        return fit_plan_table(plan, width, in_flags, details=details)
    from ...core.plan.table import format_plan

    table, _, lines = format_plan(plan, details=details).partition("\n\n")
    return f"{table}\n\n{in_flags(lines)}"
