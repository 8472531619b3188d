"""``stagewright diff``: compare two profiles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from ...core.text_table import format_table, sanitize
from ...core.units import count, format_bytes, format_time
from ..support.next_steps import command_line
from ..support.output import JsonFlag, emit, say_next
from ..support.read_documents import read_document

if TYPE_CHECKING:  # pydantic would double the time of --help
    from ...core.profile.diff import LayerChange, ProfileDiff, SizeChange, TimeChange


def command(
    before: Annotated[Path, Argument(metavar="BEFORE", help="A profile.")],
    after: Annotated[Path, Argument(metavar="AFTER", help="The profile to compare with it.")],
    as_json: JsonFlag = False,
) -> None:
    """Compare two profiles layer by layer, e.g. of two devices, commits or settings.

    An asterisk marks times that differ by more than the larger interquartile range of the two.
    """
    from ...core.profile.diff import diff
    from ...core.profile.profile import Profile

    found = diff(read_document(before, Profile), read_document(after, Profile))
    emit(found.model_dump_json(indent=2) if as_json else diff_table(found))
    say_next(command_line("show", after), quiet=as_json)


HEADINGS = ("layer", "forward", "", "backward", "", "both", "", "activations", "")

BAR_LENGTH = 10
"""Characters of a bar for twice the time, or half of it."""

MAX_NAMES = 10
"""Layers found in one profile only that are listed by name, at most."""


def diff_table(found: ProfileDiff) -> str:
    """Format the differences as a table with a row per layer and one for the total."""
    rows = [HEADINGS, *map(_row, found.layers), _row(found.total)]
    lines = [
        format_table(rows),
        "",
        "* difference beyond the larger interquartile range; ? no ranges recorded",
        f"{found.before_id} -> {found.after_id}",
        *(
            f"{what}: {sanitize(before)} -> {sanitize(after)}"
            for what, before, after in found.settings
        ),
        *_list_unmatched("the first", found.only_before),
        *_list_unmatched("the second", found.only_after),
    ]
    return "\n".join(lines)


def _row(entry: LayerChange) -> tuple[str, ...]:
    return (
        entry.name,
        _times(entry.forward), _change(entry.forward),
        _times(entry.backward), _change(entry.backward),
        bar(entry.time.relative), _change(entry.time),
        _sizes(entry.activations), _relative(entry.activations.relative),
    )  # fmt: skip


def _times(change: TimeChange) -> str:
    return f"{format_time(change.before_s)} -> {format_time(change.after_s)}"


def _sizes(change: SizeChange) -> str:
    if change.before_bytes == change.after_bytes:
        return format_bytes(change.before_bytes)
    return f"{format_bytes(change.before_bytes)} -> {format_bytes(change.after_bytes)}"


def _change(change: TimeChange) -> str:
    mark = {True: " *", False: "", None: " ?"}[change.significant]
    return _relative(change.relative) + (mark if change.before_s != change.after_s else "")


def _relative(relative: float | None) -> str:
    if relative is None:
        return "new"
    return f"{relative:+.1%}" if relative else "same"


def bar(relative: float | None) -> str:
    """Draw a bar to the left for less, to the right for more; full for a factor of two."""
    if relative is None:
        return " " * BAR_LENGTH + "|" + "+" * BAR_LENGTH
    ratio = 1 + relative
    # By ratio in both directions: half the time is as long a bar as twice the time.
    share = relative if relative >= 0 else 1 / ratio - 1 if ratio > 0 else 1.0
    length = min(round(share * BAR_LENGTH), BAR_LENGTH)
    left = "-" * length if relative < 0 else ""
    right = "+" * length if relative > 0 else ""
    return f"{left:>{BAR_LENGTH}}|{right:<{BAR_LENGTH}}"


def _list_unmatched(which: str, names: tuple[str, ...]) -> list[str]:
    if not names:
        return []
    shown = ", ".join(map(sanitize, names[:MAX_NAMES]))
    rest = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return [f"only in {which}: {count(len(names), 'layer')}: {shown}{rest}"]
