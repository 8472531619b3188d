"""Options in the words of the command line, where the library says them in Python's.

The library's messages name the fields of `PlanOptions` (``recompute='auto'``), which is what one
writes in Python and over HTTP. Here they become ``--recompute auto``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .output import output_width

if TYPE_CHECKING:
    from ...core.plan.plan import Plan, PlanOptions

FLAGS = {
    "num_microbatches": "--microbatches",
    "batch_size": "--batch-size",
    "schedule": "--schedule",
    "chunks": "--chunks",
    "max_extra_in_flight": "--extra-in-flight",
    "objective": "--objective",
    "num_stages": "--stages",
    "max_stages": "--max-stages",
    "max_replicas": "--max-replicas",
    "recompute": "--recompute",
    "layer_order": "--order",
    "skips": "--skips",
    "together": "--together",
    "no_cut_after": "--no-cut-after",
    "pins": "--pin",
    "tied": "--tied",
    "optimizer": "--optimizer",
    "memory_fraction": "--memory-fraction",
    "gap": "--gap",
    "deadline_s": "--deadline",
    "budget_s": "--budget",
    "num_threads": "--threads",
    "busy_neighbours": "--neighbours",
}
"""Fields of options, and the flag for each (a test compares them with the commands)."""

_GIVEN = re.compile(rf"(?<![\w/.\"'-])({'|'.join(FLAGS)})=('[^']*'|None|[\w.+-]*\w)")
"""A field with its value."""

_NAMED = re.compile(
    rf"(?<![\w/.\"'-])({'|'.join(name for name in FLAGS if '_' in name)})(?![\w='\"(])"
)
"""A field alone, of those that are no words of English."""

_POINTED = re.compile(rf"(?m)^(\s*)/({'|'.join(FLAGS)})(?=[:/])")
"""A field that was found wrong, at the start of a line."""


def in_flags(text: str) -> str:
    """The text with flags in the place of the fields it names."""
    text = _GIVEN.sub(_flag, text)
    return _NAMED.sub(lambda found: FLAGS[found[1]], text)


def fields_in_flags(text: str) -> str:
    """An error about a set of options, with flags for the pointers at its fields."""
    return _POINTED.sub(lambda found: found[1] + FLAGS[found[2]], text)


def _flag(found: re.Match[str]) -> str:
    name, value = found[1], found[2].strip("'")
    if value != "None":
        return f"{FLAGS[name]} {value}"
    return f"{FLAGS[name]} any" if name == "max_replicas" else f"no {FLAGS[name]}"


def plan_text(plan: Plan) -> str:
    """What ``print(plan)`` shows, with flags for fields in the lines below the table.

    In a terminal it is no wider than that.
    """
    width = output_width()
    if width is not None:
        from ...view.terminal_tables import fit_plan_table

        return fit_plan_table(plan, width, in_flags)
    table, _, lines = str(plan).partition("\n\n")
    return f"{table}\n\n{in_flags(lines)}"


def flags_of(options: PlanOptions) -> list[str]:
    """The words of a command line that ask for these options; none for defaults."""
    from ...core.plan.plan import PlanOptions

    words: list[str] = []
    for name, field in PlanOptions.model_fields.items():
        value = getattr(options, name)
        if value == field.default:
            continue
        for text in _texts(name, value):
            words += [FLAGS[name], text]
    return words


def _texts(name: str, value: object) -> list[str]:
    """An option's value as the command line takes it; several where the flag is repeated."""
    if name == "max_replicas" and value is None:
        return ["any"]
    if name == "pins" and isinstance(value, tuple):
        return [
            f"{pin.layer}={place}"
            for pin in value
            for place in (pin.stage, None if pin.kind is None else f"@{pin.kind}")
            if place is not None
        ]
    if isinstance(value, tuple):
        return [entry if isinstance(entry, str) else ":".join(entry) for entry in value]
    return [str(value)]
