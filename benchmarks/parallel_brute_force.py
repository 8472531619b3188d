"""Compare plans that share parameters, or split layers, with all plans there are.

    python benchmarks/parallel_brute_force.py --count 1000

As `step_brute_force.py`, on small random problems whose stages may also share the optimizer's
state (``zero1``) or everything (``fully_shard``) over their replicas, each in its own way. Exits
with 1 if a bound is above the best step, a plan was refused though one fits, or a plan is slower
than the best of all by more than 1 %.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from dataclasses import dataclass

from step_brute_force import MOST_TRIED, Enumeration, Plan, forget, step_s
from step_cases import Case, draw_small, limit_memory

from stagewright.core.errors import Infeasible
from stagewright.core.plan.plan import PlanOptions
from stagewright.planner.plan import plan
from stagewright.planner.validation.validate import validate

CHOICES = (
    ("replicate",),
    ("replicate", "zero1"),
    ("zero1",),
    ("replicate", "fully_shard"),
    ("fully_shard",),
    ("replicate", "zero1", "fully_shard"),
)


def held_bytes(weights: int, numel: int, optimizer: str, strategy: str, replicas: int) -> int:
    """Return weights, gradients and Adam's two moments of float32, as one replica holds them."""
    state = 8 * numel if optimizer == "adam" else 0
    if strategy == "zero1":
        return 2 * weights + math.ceil(state / replicas)
    if strategy == "fully_shard":
        return 2 * weights + math.ceil((weights + state) / replicas)
    return 2 * weights + state


@dataclass(frozen=True, eq=False)
class SharedEnumeration(Enumeration):
    """All plans of a case whose replicas may share parameters."""

    def peak_bytes(self, found: Plan) -> int:
        """Return the bytes of the fullest device, each stage with its cheapest strategy."""
        depths = self.in_flight(tuple(len(entry.devices) for entry in found))
        profile, options = self.case.profile, self.case.options
        most = 0
        for place, stage in enumerate(found):
            own = profile.parameters[stage.first : stage.last]
            weights, numel = sum(p.size_bytes for p in own), sum(p.numel for p in own)
            saved = sum(entry.size_bytes for entry in profile.storages[stage.first : stage.last])
            replicas = len(stage.devices)
            share = -(-options.num_microbatches // replicas)
            gaps = profile.boundaries
            front = gaps[stage.first - 1].forward_bytes if stage.first else 0
            back = gaps[stage.last - 1].backward_bytes if place + 1 < len(found) else 0
            held = min(
                held_bytes(weights, numel, options.optimizer, name, replicas)
                for name in {"replicate", *options.strategies}
            )
            kept = front * depths[place] + saved if stage.recompute else saved * depths[place]
            most = max(most, held + kept + min(share, 2) * (front + back))
        return most


def draw_case(seed: int) -> Case:
    """Draw a problem with replicas, a limit that some plans keep only by sharing, and Adam."""
    case, draw = draw_small("closed", seed), random.Random(f"sharing {seed}")
    asked = case.options.model_dump() | {
        "strategies": draw.choice(CHOICES),
        "max_replicas": draw.choice([2, None, None]),
        "optimizer": draw.choice(["adam", "adam", "none"]),
    }
    case = Case(case.name, case.profile, case.cluster, PlanOptions.model_validate(asked))
    needs = []
    for count, each in enumerate(SharedEnumeration(case).plans()):
        if count > MOST_TRIED:
            break
        needs.append(SharedEnumeration(case).peak_bytes(each))
    needs.sort()
    return limit_memory(case, needs[int(len(needs) * draw.choice([0.0, 0.02, 0.1, 0.3, 0.6]))])


@dataclass(frozen=True)
class Outcome:
    """Best and planned step of one case, and how its stages share."""

    name: str
    plans: int
    best_s: float
    step_s: float
    bound_s: float
    strategies: tuple[str, ...]


def judge(case: Case) -> Outcome | None:
    """Enumerate and plan one case; `None` if there are too many plans."""
    found, best_s, count = SharedEnumeration(case), math.inf, 0
    for each in found.plans():
        count += 1
        if count > MOST_TRIED:
            return None
        if found.fits(each):
            best_s = min(best_s, step_s(found, found.times(each)))
    try:
        made = plan(case.profile, case.cluster, case.options)
    except Infeasible:
        if best_s < math.inf:
            raise AssertionError(f"{case.name}: refused, but a plan fits") from None
        return None
    validate(made, case.profile, case.cluster)
    return Outcome(
        case.name, count, best_s, made.step_time_s, made.proof.simulated_lower_bound_s,
        tuple(stage.strategy for stage in made.stages),
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=1000, help="cases judged")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one drawn")
    arguments = parser.parse_args()
    found: list[Outcome] = []
    seed, failures = arguments.first, 0
    while len(found) < arguments.count:
        outcome = judge(draw_case(seed))
        seed += 1
        forget()
        if outcome is None:
            continue
        found.append(outcome)
        wrong = []
        if outcome.bound_s > outcome.best_s * (1 + 1e-9):
            wrong.append(f"bound {outcome.bound_s} above the best step {outcome.best_s}")
        if outcome.step_s < outcome.best_s * (1 - 1e-9):
            wrong.append(f"step {outcome.step_s} below the best of all plans {outcome.best_s}")
        if outcome.step_s > outcome.best_s * 1.01:
            wrong.append(f"{outcome.step_s / outcome.best_s - 1:.1%} slower than the best")
        for each in wrong:
            print(f"{outcome.name}: {each}")
        failures += bool(wrong)
    best = sum(entry.step_s <= entry.best_s * (1 + 1e-9) for entry in found)
    shared = sum(bool({"zero1", "fully_shard"} & set(entry.strategies)) for entry in found)
    print(
        f"{len(found)} cases, {shared} of them plan shared state; best in {best} "
        f"({best / len(found):.2%}), worst miss "
        f"{max(entry.step_s / entry.best_s - 1 for entry in found):.2%}, printed gap median "
        f"{statistics.median(entry.step_s / entry.bound_s - 1 for entry in found):.2%}"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
