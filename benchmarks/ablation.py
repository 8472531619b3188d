"""Switch each piece of the planner's search off in turn, and show what that changes.

    python benchmarks/ablation.py --write docs/evidence/ablation.md

The problems are those of `ablation_cases.py`, the pieces those of `ablation_pieces.py`. For every
piece: in how many problems the simulated step of the plan is another one without it, the mean and
the worst change of the step (positive where plans get slower), the change of the mean proven gap of
the step and of the objective, in percentage points, and the processor time to plan all of them.
Problems without a plan are those in which none was found without the piece.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ablation_cases import list_cases
from ablation_pieces import PIECES, Piece
from tables import markdown_table, write_between_marks

from stagewright.core.errors import StagewrightError
from stagewright.planner.problem.problem import PlanningRequest
from stagewright.planner.solvers.solve import solve
from stagewright.schedules.numba_jit import load

TIME_LIMIT_S = 20.0
"""Of one problem; without a piece a search may not end."""

SAME = 1e-9
"""Steps closer than this, relatively, are equal."""


@dataclass(frozen=True)
class Outcome:
    """One problem planned; infinite where no plan was found."""

    family: str
    case: str
    step_s: float
    gap: float
    objective_gap: float
    busy_s: float


def plan_all() -> list[Outcome]:
    """Plan every problem."""
    load()
    found = []
    for family, case in list_cases():
        deadline, began = time.monotonic() + TIME_LIMIT_S, time.process_time()
        try:
            made = solve(
                PlanningRequest(case.profile, case.cluster, case.options, deadline=deadline)
            )
        except StagewrightError:
            busy_s = time.process_time() - began
            found.append(Outcome(family, case.name, math.inf, math.inf, math.inf, busy_s))
            continue
        step_s = made.costed.step_time_s
        gap = step_s / made.simulated_bound_s - 1 if made.simulated_bound_s else math.inf
        objective_gap = 1 / (1 - made.search_gap) - 1 if made.search_gap < 1 else math.inf
        busy_s = time.process_time() - began
        found.append(Outcome(family, case.name, step_s, gap, objective_gap, busy_s))
    return found


def plan_without(number: int) -> list[Outcome]:
    """Plan every problem without one piece; a number below 0 stands for none."""
    if number < 0:
        plan_all()  # read machine code, fill caches
        return plan_all()
    list_cases()
    with PIECES[number].off():
        return plan_all()


@dataclass(frozen=True)
class Effect:
    """What is different without a piece."""

    slower: int
    faster: int
    unplanned: int
    mean: float
    worst: float
    worst_case: str
    gap: float
    objective_gap: float
    busy_s: float


def compare(whole: list[Outcome], without: list[Outcome]) -> Effect:
    """Compare the outcomes problem by problem."""
    pairs = [pair for pair in zip(whole, without, strict=True) if pair[0].step_s < math.inf]
    changes = {
        one.case: other.step_s / one.step_s - 1 for one, other in pairs if other.step_s < math.inf
    }
    worst_case = max(changes, key=changes.__getitem__)
    gaps = [min(other.gap, 1.0) - min(one.gap, 1.0) for one, other in pairs]
    objective_gaps = [
        min(other.objective_gap, 1.0) - min(one.objective_gap, 1.0) for one, other in pairs
    ]
    return Effect(
        slower=sum(change > SAME for change in changes.values()),
        faster=sum(change < -SAME for change in changes.values()),
        unplanned=len(pairs) - len(changes),
        mean=statistics.mean(changes.values()),
        worst=changes[worst_case],
        worst_case=worst_case,
        gap=statistics.mean(gaps),
        objective_gap=statistics.mean(objective_gaps),
        busy_s=sum(entry.busy_s for entry in without),
    )


def row(piece: Piece, effect: Effect) -> list[str]:
    """Return a row of the table."""
    is_slower = effect.worst > SAME
    return [
        piece.part, piece.name, str(piece.lines or ""), str(effect.slower), str(effect.faster),
        str(effect.unplanned), f"{effect.mean:+.2%}" if effect.slower + effect.faster else "0",
        f"{effect.worst:+.1%}" if is_slower else "0", effect.worst_case if is_slower else "",
        f"{100 * effect.gap:+.2f}", f"{100 * effect.objective_gap:+.2f}", f"{effect.busy_s:.1f}",
    ]  # fmt: skip


HEAD = (
    "part", "without", "lines", "slower", "faster", "no plan", "mean", "worst", "which", "step gap",
    "objective gap", "s",
)  # fmt: skip


def report(whole: list[Outcome], effects: list[tuple[Piece, Effect]]) -> str:
    """Return the text between the marks."""
    families: dict[str, int] = {}
    for outcome in whole:
        families[outcome.family] = families.get(outcome.family, 0) + 1
    planned = [outcome for outcome in whole if outcome.step_s < math.inf]
    names = ", ".join(f"{count} {family}" for family, count in families.items())
    mean = statistics.mean(min(outcome.gap, 1.0) for outcome in planned)
    first = (
        f"{len(whole)} problems ({names}), {len(planned)} of which have a plan. With all pieces: "
        f"mean gap of the step {mean:.2%}, {sum(outcome.busy_s for outcome in whole):.1f} s of "
        "processor time."
    )
    return f"{first}\n\n{markdown_table(HEAD, [row(*each) for each in effects], left=2)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="pieces whose name contains this")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--write", type=Path, help="replace the table in this document")
    arguments = parser.parse_args()
    numbers = [number for number, piece in enumerate(PIECES) if arguments.only in piece.name]
    effects = []
    with ProcessPoolExecutor(arguments.workers) as pool:
        results = pool.map(plan_without, [-1, *numbers])
        whole = next(results)
        for number, without in zip(numbers, results, strict=True):
            effects.append((PIECES[number], compare(whole, without)))
            print(" | ".join(row(*effects[-1])), flush=True)
    if arguments.write:
        write_between_marks(arguments.write, "ablation.py", report(whole, effects))
    return 0


if __name__ == "__main__":
    sys.exit(main())
