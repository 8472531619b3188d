"""Rows as a table in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from .behaviour import TOLERANCE
from .row import Row

HEAD = (
    "| architecture | verdict | captured | layers | legal cuts | opaque layers | outputs "
    "| gradients | buffers | parameters | eval | s |\n"
    "|---|---|---|--:|--:|---|---|---|---|---|---|--:|"
)

TITLES = {
    "transformers": "From `transformers` configurations",
    "vision": "Images",
    "recurrent": "Recurrent",
    "composed": "Composed",
    "trap": "Traps",
    "hostile": "Hostile",
}


def table(rows: Sequence[Row]) -> str:
    """One table a kind, and below it what became opaque and why, or was refused."""
    parts = []
    for kind, title in TITLES.items():
        those = [row for row in rows if row.kind == kind]
        if those:
            parts += [f"### {title}", "\n".join([HEAD, *map(line, those)])]
            remarks = [remark for row in those for remark in _remarks(row)]
            parts += ["\n".join(remarks)] if remarks else []
    return "\n\n".join(parts)


def line(row: Row) -> str:
    verdict = f"**{row.verdict}**" if row.verdict in ("WRONG", "failed") else row.verdict
    trap = f": {row.trap}" if row.trap else ""
    cuts = f"{row.legal_cuts} of {row.cuts}" if row.layers else ""
    return (
        f"| {row.name}{trap} | {verdict} | {row.mode} | {row.layers or ''} | {cuts} "
        f"| {len(row.opaque) or ''} | {_equal(row.outputs)} | {_equal(row.gradients)} "
        f"| {_equal(row.buffers)} | {_equal(row.parameters)} | {row.eval} | {row.capture_s:.1f} |"
    )


def _equal(difference: float | None) -> str:
    if difference is None:
        return ""
    if difference == 0:
        return "same bits"
    return f"{difference:.0e}" if difference <= TOLERANCE else f"**{difference:.1e}**"


def _remarks(row: Row) -> list[str]:
    """Why modules are opaque, those with the same reason together; and what is not equal."""
    names: dict[str, list[str]] = {}
    for name, why in row.opaque.items():
        names.setdefault(why, []).append(f"`{name or 'the whole model'}`")
    found = [f"- {row.name}, opaque {', '.join(those)}: {_plain(w)}" for w, those in names.items()]
    if row.verdict not in ("equal", "equal, with opaque layers"):
        found.append(f"- {row.name}, {row.verdict}: {_plain(row.reason)}")
    return found


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
