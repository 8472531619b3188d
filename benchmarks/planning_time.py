"""Time the planner from 8 to 131,072 devices and 100 to 10,000 layers, against targets.

    python benchmarks/planning_time.py --write docs/evidence/planning-time.md

Each row is one run of `benchmarks/planner.py` in a process of its own: `--json` prints the rows as
they are. Exits with 1 if a plan is not proven to its gap or a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tables import write_between_marks

PLANNER = Path(__file__).parent / "planner.py"


@dataclass(frozen=True)
class Row:
    """A problem and the seconds it may take: a whole plan, the first one, and a changed one."""

    layers: int
    devices: int
    gap: float
    solve_s: float
    first_plan_s: float | None = None
    what_if_s: float | None = None
    memory_gb: float = 32.0
    compiled: bool = True
    kinds: int = 1
    bytes_per_parameter: int = 12


ROWS = (
    *(Row(200, count, 1e-4, 1.0, first_plan_s=0.05) for count in (8, 64, 512, 4_096)),
    Row(200, 131_072, 1e-4, 2.0),
    *(Row(200, count, 1e-4, 5.0, compiled=False) for count in (8, 64, 512, 4_096)),
    Row(1_000, 4_096, 1e-4, 5.0),
    Row(10_000, 4_096, 1e-2, 10.0),
    Row(100, 64, 1e-4, 1.0, what_if_s=0.05),
)
"""What is claimed; 32 GB a device, as 10,000 of these layers need on 4,096 devices.

At 12 bytes a parameter, as before plans named a recipe of precision.
"""

HARDER = (
    Row(200, 64, 1e-4, 5.0, memory_gb=16.0, compiled=False),
    Row(200, 4_096, 1e-4, 1.0, memory_gb=16.0),
    Row(200, 131_072, 1e-4, 2.0, memory_gb=16.0),
    Row(1_000, 4_096, 1e-4, 5.0, memory_gb=16.0),
    *(Row(200, count, 1e-4, 1.0, bytes_per_parameter=18) for count in (8, 64, 512, 4_096)),
    *(Row(200, count, 1e-4, 1.0, memory_gb=40.0, bytes_per_parameter=18) for count in (64, 512)),
    Row(1_000, 4_096, 1e-4, 5.0, memory_gb=40.0),
)
"""Measured beside them; a missed target among these is shown, and no failure."""

RECIPES = {
    12: ("--precision", "bf16_mixed_bf16_gradients", "--optimizer", "momentum"),
    18: ("--precision", "bf16_mixed", "--optimizer", "adam"),
}
"""Flags of `benchmarks/planner.py` by the bytes that a parameter takes."""

TIME_LIMIT_S = 300
"""Of a row's process, which warms up, plans and plans again; a row that takes longer says so."""

KINDS = (
    Row(48, 48, 1e-2, 5.0, first_plan_s=0.5, memory_gb=24.0, kinds=3, bytes_per_parameter=18),
    Row(100, 64, 1e-2, 3.0, memory_gb=24.0, kinds=2, bytes_per_parameter=18),
    Row(100, 192, 1e-2, 30.0, memory_gb=24.0, kinds=3, bytes_per_parameter=18),
)
"""Equally many devices of each kind, of speed 1, 0.55 and 0.35 and memory 1, 5/6 and 1/2."""


def measured(row: Row, repeats: int) -> dict[str, Any] | None:
    """Run the planner's benchmark; return its figures, or None if it took too long."""
    command = [
        sys.executable, str(PLANNER), "--json", "--layers", str(row.layers), "--devices",
        str(row.devices), "--gap", str(row.gap), "--memory-gb", str(row.memory_gb), "--repeats",
        str(repeats), "--kinds", str(row.kinds), *RECIPES[row.bytes_per_parameter],
    ]  # fmt: skip
    environment = dict(os.environ)
    if not row.compiled:
        environment["STAGEWRIGHT_NUMBA"] = "0"
    try:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, timeout=TIME_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return None
    if not done.stdout:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode} and printed nothing")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def is_kept(row: Row, found: dict[str, Any] | None) -> bool:
    """Return True if the gap is proven and every target met."""
    if found is None:
        return False
    limits = {"solve_s": row.solve_s, "first_plan_s": row.first_plan_s, "what_if_s": row.what_if_s}
    in_time = all(found[key] <= limit for key, limit in limits.items() if limit is not None)
    return in_time and found["search_gap"] <= row.gap * (1 + 1e-6)


def line(row: Row, found: dict[str, Any] | None) -> str:
    """Return a row of the table."""
    count = f"{row.devices:,}"
    if row.kinds > 1:
        count = f"{row.kinds} kinds of {row.devices // row.kinds}"
    problem = (
        f"| {row.layers:,} | {count} | {row.memory_gb:g} GB | {row.bytes_per_parameter} "
        f"| {'yes' if row.compiled else 'no'} "
    )
    if found is None:
        return f"{problem}| | | not done in {TIME_LIMIT_S} s | | | | **no** |"

    def timed(key: str, limit: float | None) -> str:
        return f"{found[key]:.3g}" + (f" ({limit:g})" if limit is not None else "")

    return (
        f"{problem}| {found['search_gap']:.1e} | {found['gap']:.1%} "
        f"| {timed('solve_s', row.solve_s)} | {timed('first_plan_s', row.first_plan_s)} "
        f"| {timed('what_if_s', row.what_if_s)} | {found['peak_memory_bytes'] / 1e6:.0f} MB "
        f"| {'yes' if is_kept(row, found) else '**no**'} |"
    )


HEAD = (
    "| layers | devices | memory of each | bytes a parameter | numba | search's gap "
    "| step's gap | plan, s | first plan, s | what-if, s | peak memory | in time |\n"
    "|--:|--:|--:|--:|---|--:|--:|--:|--:|--:|--:|---|"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=3, help="of each row; medians are shown")
    parser.add_argument("--write", type=Path, help="replace the tables in this document")
    parser.add_argument("--json", action="store_true", help="one object a row")
    arguments = parser.parse_args()
    missed = 0
    tables = []
    for title, rows in (("Claimed", ROWS), ("Several kinds", KINDS), ("Harder", HARDER)):
        lines = [f"## {title}", "", HEAD]
        for row in rows:
            found = measured(row, arguments.repeats)
            missed += rows is not HARDER and not is_kept(row, found)
            lines.append(line(row, found))
            print(json.dumps(found) if arguments.json else lines[-1], flush=True)
        tables.append("\n".join(lines))
    if arguments.write:
        write_between_marks(arguments.write, "planning_time.py", "\n\n".join(tables))
    if missed:
        print(f"{missed} claimed rows were late or not proven", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
