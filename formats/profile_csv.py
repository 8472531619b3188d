"""A profile as comma-separated values: a row a layer, the unit in every column's name."""

from __future__ import annotations

import csv
import io

from ..core.graph.graph import Boundary
from ..core.profile.profile import LayerProfile, Profile, Timing

Cell = str | int | float | bool | None

TIMINGS = (
    "forward", "backward", "backward_input", "backward_weight", "recompute",
    "dispatch_forward", "dispatch_backward",
)  # fmt: skip
SIZES = ("saved_activation_bytes", "output_bytes", "workspace_bytes")

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")
"""First characters of a cell that spreadsheets compute instead of showing."""


def profile_csv(profile: Profile) -> str:
    """CSV with a header row (RFC 4180); an empty cell is something that was not measured.

    Figures are those of the profile, unrounded. What a cut behind a layer sends stands in the
    layer's row; the last layer has none. A name that a spreadsheet would compute begins with an
    apostrophe.
    """
    rows = profile_rows(profile)
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows({name: _quote(cell) for name, cell in row.items()} for row in rows)
    return text.getvalue()


def _quote(cell: Cell) -> Cell:
    # As OWASP advises on CSV injection: names are a client's text, such as =HYPERLINK(...).
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA_STARTS) else cell


def profile_rows(profile: Profile) -> list[dict[str, Cell]]:
    """Return the rows of `profile_csv` as values instead of text."""
    cuts: list[Boundary | None] = [*profile.boundaries, None]
    return [
        _row(index, entry, cut)
        for index, (entry, cut) in enumerate(zip(profile.layers, cuts, strict=True))
    ]


def _row(index: int, entry: LayerProfile, cut: Boundary | None) -> dict[str, Cell]:
    layer = entry.layer
    row: dict[str, Cell] = {
        "index": index,
        "layer": layer.name,
        "module_type": layer.module_type,
        "cost_class": layer.cost_class,
        "opaque": layer.opaque,
        "parameter_bytes": layer.parameter_bytes,
    }
    for name in TIMINGS:
        timing: Timing | None = getattr(entry, name)
        row[f"{name}_s"] = None if timing is None else timing.median_s
        row[f"{name}_spread_s"] = None if timing is None else timing.spread_s
        row[f"{name}_repeats"] = None if timing is None else timing.repeats
    row |= {name: getattr(entry, name) for name in SIZES}
    row["cut_legal"] = None if cut is None else cut.legal
    row["cut_forward_bytes"] = None if cut is None else cut.forward_bytes
    row["cut_backward_bytes"] = None if cut is None else cut.backward_bytes
    return row
