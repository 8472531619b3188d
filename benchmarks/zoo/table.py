"""Rows as a table in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from tables import escaped, markdown_table

from .behaviour import TOLERANCE
from .row import Row

HEAD = (
    "architecture", "verdict", "captured", "layers", "legal cuts", "opaque layers", "outputs",
    "gradients", "buffers", "parameters", "eval", "s",
)  # fmt: skip

TITLES = {
    "transformers": "From `transformers` configurations",
    "vision": "Images",
    "recurrent": "Recurrent",
    "composed": "Composed",
    "trap": "Traps",
    "hostile": "Hostile",
    "drawn": "Drawn from all configurations of `transformers`",
    "timm": "Drawn from the nets of `timm`",
}


def table(rows: Sequence[Row]) -> str:
    """One table a kind, and below it what became opaque and why, or was refused."""
    parts = []
    for kind, title in TITLES.items():
        those = [row for row in rows if row.kind == kind]
        if those:
            parts += [f"### {title}", markdown_table(HEAD, map(cells, those), left=3)]
            remarks = [remark for row in those for remark in _remarks(row)]
            parts += ["\n".join(remarks)] if remarks else []
    return "\n\n".join(parts)


def cells(row: Row) -> tuple[object, ...]:
    return (
        f"{row.name}: {row.trap}" if row.trap else row.name,
        f"**{row.verdict}**" if row.verdict in ("WRONG", "failed") else row.verdict,
        row.mode,
        row.layers or "",
        f"{row.legal_cuts} of {row.cuts}" if row.layers else "",
        len(row.opaque) or "",
        *map(_equal, (row.outputs, row.gradients, row.buffers, row.parameters)),
        row.eval,
        f"{row.capture_s:.1f}",
    )


def _equal(difference: float | None) -> str:
    if difference is None:
        return ""
    if difference == 0:
        return "same bits"
    return f"{difference:.0e}" if difference <= TOLERANCE else f"**{difference:.1e}**"


def _remarks(row: Row) -> list[str]:
    """Return why modules are opaque, grouped by reason, and what is not equal."""
    names: dict[str, list[str]] = {}
    for name, why in row.opaque.items():
        names.setdefault(why, []).append(f"`{name or 'the whole model'}`")
    found = [f"- {row.name}, opaque {', '.join(those)}: {escaped(w)}" for w, those in names.items()]
    if row.verdict not in ("equal", "equal, with opaque layers"):
        found.append(f"- {row.name}, {row.verdict}: {escaped(row.reason)}")
    return found
