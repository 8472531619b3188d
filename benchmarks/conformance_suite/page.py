"""The conformance table in words: grids, reasons, and what was promised but not kept."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from tables import escaped, markdown_table

from conformance_suite.cell import RANKS, SCHEDULES, Outcome, Row, Side

WORDS = ("equal", "refused", "wrong", "error", "hang")
MOST_REFUSED = 0.1
NEVER_REFUSED = ("gpipe", "1f1b")
LONGEST = 240


def page(rows: Sequence[Row]) -> str:
    """Return a sentence, a grid for each number of ranks, and the reasons below."""
    parts = [summary(rows)]
    for ranks in RANKS:
        those = [row for row in rows if row.cell.ranks == ranks]
        if those:
            parts += [f"### {ranks} ranks", grid(those)]
    titles: dict[Side, str] = {"ours": "Why ours is not equal", "torch": "Why torch's is not equal"}
    for side, title in titles.items():
        found = reasons(rows, side)
        if found:
            parts += [f"### {title}", "\n".join(found)]
    return "\n\n".join(parts)


def summary(rows: Sequence[Row]) -> str:
    """Return the numbers of cells of each kind, side by side."""
    return "; ".join(
        f"{side}: {_tally([getattr(row, side) for row in rows])}"
        for side in ("ours", "torch")
        if any(getattr(row, side).verdict for row in rows)
    )


def _tally(outcomes: Sequence[Outcome]) -> str:
    count = Counter(outcome.word for outcome in outcomes)
    return f"{len(outcomes)} cells, " + ", ".join(f"{count[word]} {word}" for word in WORDS)


def grid(rows: Sequence[Row]) -> str:
    """Return a line a model, a column a schedule; ours, then torch's."""
    cells = {(row.cell.model, row.cell.schedule): row for row in rows}
    schedules = [name for name in SCHEDULES if any(name == there for _, there in cells)]
    rows_of_models = [
        (model, *(_both(cells.get((model, schedule))) for schedule in schedules))
        for model in dict.fromkeys(row.cell.model for row in rows)
    ]
    return markdown_table(("model", *schedules), rows_of_models, left=1 + len(schedules))


def _both(row: Row | None) -> str:
    if row is None:
        return ""
    return " / ".join(_marked(o) for o in (row.ours, row.torch) if o.verdict)


def _marked(outcome: Outcome) -> str:
    return outcome.word if outcome.word in ("equal", "refused") else f"**{outcome.word}**"


def reasons(rows: Sequence[Row], side: Side) -> list[str]:
    """Each reason for not being equal once, with the cells that have it."""
    found: dict[str, dict[str, dict[str, list[int]]]] = {}  # why, model, schedule: ranks
    for row in rows:
        outcome: Outcome = getattr(row, side)
        if outcome.word not in ("", "equal"):
            _, _, reason = outcome.verdict.partition(": ")
            why = f"{outcome.word}: {_short(reason or outcome.detail)}"
            models = found.setdefault(why, {})
            schedules = models.setdefault(row.cell.model, {})
            schedules.setdefault(row.cell.schedule, []).append(row.cell.ranks)
    lines = []
    for why, models in found.items():
        lines.append(f"- {escaped(why)}")
        lines += [f"  - {model}: {_where(schedules)}" for model, schedules in models.items()]
    return lines


def _where(schedules: dict[str, list[int]]) -> str:
    return ", ".join(
        f"{schedule} on {' and '.join(map(str, ranks))}" for schedule, ranks in schedules.items()
    )


_PLACES = re.compile(r"\[enforce fail at [^]]*\] | ?\(\[[\d.]+\]:[^)]*\)")
_STAGES = re.compile(r"\[\d+(, \d+)*\]|\bstage \d+")


def _short(text: str) -> str:
    """Without addresses and numbers of stages, in which like errors differ; a line or two."""
    bare = _STAGES.sub(lambda found: "[..]" if found[0][0] == "[" else "a stage", text)
    bare = _PLACES.sub("", bare).strip()
    return bare if len(bare) <= LONGEST else f"{bare[:LONGEST].rsplit(' ', 1)[0]} ..."


def faults(rows: Sequence[Row]) -> list[str]:
    """Return what was promised of ours and is not so."""
    found = [
        f"{row.cell} is {row.ours.word}: {row.ours.detail}"
        for row in rows
        if row.ours.word not in ("equal", "refused")
    ]
    refused = [row for row in rows if row.ours.word == "refused"]
    for row in refused:
        if row.cell.schedule in NEVER_REFUSED:
            found.append(f"{row.cell} is refused, and {row.cell.schedule} refuses nothing")
        elif row.torch.word == "equal":
            found.append(f"{row.cell} is refused, where torch is equal")
    if len(refused) > MOST_REFUSED * len(rows):
        found.append(f"{len(refused)} of {len(rows)} cells are refused, more than a tenth")
    return found
