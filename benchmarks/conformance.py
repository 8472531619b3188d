"""Compare pipelines with the unsplit model, by model and schedule, ours and torch's.

    python benchmarks/conformance.py --write docs/evidence/conformance.md

Every cell is a model under a schedule on two or four processes: two steps, each loss, gradient,
buffer and name held against the unsplit model over the same micro-batches. Exits with 1 if ours is
neither equal nor refused, or refuses more than it may.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import torch
import torch._dynamo  # imported before the forks: seconds, once instead of in every process
from conformance_suite.cell import RANKS, SCHEDULES, Cell, Outcome, Row, Side
from conformance_suite.group import Group
from conformance_suite.models import MODELS
from conformance_suite.page import faults, page, summary
from conformance_suite.worker import MANNERS
from tables import write_between_marks

TIME_LIMIT_S = 20.0

KEYS = ("model", "schedule", "ranks")


def all_cells() -> list[Cell]:
    """Every cell, those of the same processes together."""
    names = [model.name for model in MODELS]
    return [Cell(m, s, r) for r, m, s in product(RANKS, names, SCHEDULES)]


def chosen(only: str) -> list[Cell]:
    """Return the cells that have one of the values given for each key.

    Raises:
        SystemExit: No cell has such a value.
    """
    wanted: dict[str, set[str]] = {}
    for part in filter(None, only.split(",")):
        key, _, value = part.partition("=")
        if key not in KEYS:
            raise SystemExit(f"--only takes {', '.join(f'{k}=...' for k in KEYS)}, not {part!r}")
        wanted.setdefault(key, set()).add(value.lower())
    for key, values in wanted.items():
        there = {str(getattr(cell, key)).lower() for cell in all_cells()}
        if unknown := values - there:
            raise SystemExit(f"no {key} {', '.join(unknown)}; there are {', '.join(sorted(there))}")
    return [
        cell
        for cell in all_cells()
        if all(str(getattr(cell, key)).lower() in values for key, values in wanted.items())
    ]


def rows(cells: Sequence[Cell], sides: Sequence[Side], limit_s: float) -> Iterator[Row]:
    """One row a cell; a side's processes stay for all cells of as many ranks."""
    groups: dict[tuple[Side, int], Group] = {}
    try:
        for cell in cells:
            found: dict[Side, Outcome] = {}
            for side in sides:
                key = (side, cell.ranks)
                for other in [known for known in groups if known[1] != cell.ranks]:
                    groups.pop(other).stop()
                group = groups.setdefault(key, Group(side, cell.ranks, limit_s))
                found[side] = group.outcome(cell)
            yield Row(cell, found.get("ours", Outcome()), found.get("torch", Outcome()))
    finally:
        for group in groups.values():
            group.stop()


def run(cells: Sequence[Cell], sides: Sequence[Side], limit_s: float) -> Iterator[Row]:
    """Yield the rows, with a line on stderr for each."""
    torch.set_num_threads(1)
    begin = time.monotonic()
    for number, row in enumerate(rows(cells, sides, limit_s), 1):
        passed_s = time.monotonic() - begin
        told = ", ".join(f"{side} {getattr(row, side).word}" for side in sides)
        place = f"{number}/{len(cells)}"
        print(f"{place} {row.cell}: {told} ({passed_s:.0f} s)", file=sys.stderr, flush=True)
        yield row


def read(paths: Sequence[Path]) -> list[Row]:
    """Rows printed before; what a later file says of a cell replaces what an earlier one did."""
    found: dict[Cell, Row] = {}
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = Row.from_dict(json.loads(line))
            known = found.get(row.cell, Row(row.cell, Outcome(), Outcome()))
            ours = row.ours if row.ours.verdict else known.ours
            found[row.cell] = Row(row.cell, ours, row.torch if row.torch.verdict else known.torch)
    return [found[cell] for cell in all_cells() if cell in found]


def is_whole(found: Sequence[Row]) -> bool:
    """Every cell, on both sides."""
    return {row.cell for row in found} == set(all_cells()) and all(
        row.ours.verdict and row.torch.verdict for row in found
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", metavar="KEY=VALUE,...", help="|".join(KEYS))
    parser.add_argument("--json", action="store_true", help="one object a cell")
    parser.add_argument("--ours-only", action="store_true")
    parser.add_argument("--torch-only", action="store_true")
    parser.add_argument(
        "--read", type=Path, nargs="+", metavar="FILE", help="what --json printed, instead of runs"
    )
    parser.add_argument("--write", type=Path, help="replace the tables in this document")
    parser.add_argument(
        "--as-on-nccl", action="store_true",
        help="our side alone, launched in NCCL's order, which is replayed to find what would hang",
    )  # fmt: skip
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_S, help="seconds a cell")
    arguments = parser.parse_args()
    cells = chosen(arguments.only)
    both: tuple[Side, ...] = ("ours", "torch")
    alone = arguments.ours_only or arguments.as_on_nccl
    unwanted = {"torch" if alone else "", "ours" if arguments.torch_only else ""}
    sides = [side for side in both if side not in unwanted]
    if arguments.write and not arguments.read and (arguments.only or len(sides) < 2):
        parser.error("--write takes the whole table, both columns")
    with tempfile.TemporaryDirectory() as folder:
        if arguments.as_on_nccl:
            os.environ[MANNERS] = folder
            # The emulation is part of the tests.
            sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
        return report(arguments, cells, sides)


def report(arguments: argparse.Namespace, cells: Sequence[Cell], sides: Sequence[Side]) -> int:
    """Print or write the rows; return the exit code."""
    found = []
    for row in read(arguments.read) if arguments.read else run(cells, sides, arguments.time_limit):
        found.append(row)
        if arguments.json:
            print(json.dumps(row.to_dict()), flush=True)
    if not arguments.json:
        print(page(found))
    if arguments.write and not is_whole(found):
        raise SystemExit(f"--write takes the whole table, both columns; {len(found)} cells here")
    if arguments.write:
        write_between_marks(arguments.write, "conformance.py", page(found))
    print(summary(found), file=sys.stderr)
    broken = [] if arguments.torch_only else faults(found)
    for fault in broken:
        print(f"not kept: {fault}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
