"""Translation of option fields in messages into command-line flags.

The library's messages name the fields of `PlanOptions` (``recompute='auto'``), as written in
Python and over HTTP. On the command line they become ``--recompute auto``.
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
"""The flag of each option field (a test compares them with the commands)."""

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


def plan_text(plan: Plan) -> str:
    """Format a plan as ``print(plan)`` does, with flags for fields and fitted to the terminal."""
    width = output_width()
    if width is not None:
        from ...view.terminal_tables import fit_plan_table

        return fit_plan_table(plan, width, in_flags)
    table, _, lines = str(plan).partition("\n\n")
    return f"{table}\n\n{in_flags(lines)}"


def flags_of(options: PlanOptions) -> list[str]:
    """Return the command-line words for these options; defaults are left out."""
    from ...core.plan.plan import PlanOptions

    words: list[str] = []
    for name, field in PlanOptions.model_fields.items():
        value = getattr(options, name)
        if value == field.default:
            continue
        for text in _format_value(name, value):
            words += [FLAGS[name], text]
    return words


def _format_value(name: str, value: object) -> list[str]:
    """Format an option's value for the command line; several texts if the flag is repeated."""
    if name == "max_replicas" and value is None:
        return ["any"]
    if name == "pins" and isinstance(value, tuple):
        # A pin may name a stage and a kind of device, which takes two flags.
        return [
            f"{pin.layer}={target}"
            for pin in value
            for target in (pin.stage, None if pin.kind is None else f"@{pin.kind}")
            if target is not None
        ]
    if isinstance(value, tuple):
        return [entry if isinstance(entry, str) else ":".join(entry) for entry in value]
    return [str(value)]
