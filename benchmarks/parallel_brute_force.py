"""Compare plans that share parameters, or split layers, with all plans there are.

    python benchmarks/parallel_brute_force.py --count 1000

As `step_brute_force.py`, on small random problems whose stages may also share the optimizer's
state (``zero1``) or everything (``fully_shard``) over their replicas, each in its own way, and
whose layers may be split over 1, 2 or 3 devices, the number chosen (``--tensor``). Exits
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

from stagewright.core.cluster.cluster import Cluster
from stagewright.core.errors import Infeasible
from stagewright.core.plan.plan import PlanOptions
from stagewright.core.profile.profile import Profile, SplitLayer, TensorSplit
from stagewright.planner.plan import plan
from stagewright.planner.validation.reference_tensor import reduce_problem
from stagewright.planner.validation.validate import validate

CHOICES = (
    ("replicate",),
    ("replicate", "zero1"),
    ("zero1",),
    ("replicate", "fully_shard"),
    ("fully_shard",),
    ("replicate", "zero1", "fully_shard"),
)


def held_bytes(
    weights: int, numels: list[int], optimizer: str, strategy: str, replicas: int
) -> int:
    """Return weights, gradients and Adam's two moments of float32, as one replica holds them.

    By zero1 a replica has at most the largest weight's moments, and its part of the others.
    """
    state = 8 * sum(numels) if optimizer == "adam" else 0
    if strategy == "zero1" and state:
        most = 8 * max(numels)
        return 2 * weights + most + math.ceil((state - most) / replicas)
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
        shared = [name for name in ("zero1", "fully_shard") if name in options.strategies]
        most = 0
        for place, stage in enumerate(found):
            own = profile.parameters[stage.first : stage.last]
            weights, numels = sum(p.size_bytes for p in own), [p.numel for p in own]
            saved = sum(entry.size_bytes for entry in profile.storages[stage.first : stage.last])
            replicas = len(stage.devices)
            share = -(-options.num_microbatches // replicas)
            gaps = profile.boundaries
            front = gaps[stage.first - 1].forward_bytes if stage.first else 0
            back = gaps[stage.last - 1].backward_bytes if place + 1 < len(found) else 0
            held = min(
                held_bytes(weights, numels, options.optimizer, name, replicas)
                for name in ("replicate", *shared[:1])
            )
            kept = front * depths[place] + saved if stage.recompute else saved * depths[place]
            most = max(most, held + kept + min(share, 2) * (front + back))
        return most


def draw_splits(draw: random.Random, profile: Profile, degree: int) -> TensorSplit:
    """Draw a split of every layer, with collectives that cost next to nothing or too much."""
    layers = []
    for entry, kept in zip(profile.layers, profile.storages, strict=True):
        if draw.random() < 0.2:
            layers.append(
                SplitLayer(
                    parameter_bytes=entry.layer.parameter_bytes,
                    saved_activation_bytes=entry.saved_activation_bytes,
                )
            )
            continue
        size, count = int(kept.size_bytes * 10 ** draw.uniform(-3, 0)), draw.randrange(3)
        layers.append(
            SplitLayer(
                compute_share=draw.triangular(1 / degree, 1, 1 / degree),
                parameter_bytes=int(entry.layer.parameter_bytes * draw.uniform(1 / degree, 1)),
                saved_activation_bytes=int(
                    entry.saved_activation_bytes * draw.uniform(1 / degree, 1)
                ),
                forward_reduced_bytes=size * count,
                forward_reductions=count,
                backward_reduced_bytes=size,
                backward_reductions=1,
                forward_gathered_bytes=size * draw.randrange(2),
                backward_gathered_bytes=size,
                gathers=draw.randrange(1, 4),
            )
        )
    return TensorSplit(degree=degree, layers=tuple(layers))


def draw_split_case(seed: int) -> Case:
    """Draw a problem whose layers split over 2 and 3 devices; links are fast inside a node."""
    case, draw = draw_case(seed), random.Random(f"tensor {seed}")
    layers = tuple(
        entry.model_copy(
            update={
                "layer": entry.layer.model_copy(update={"parameter_bytes": weight.size_bytes}),
                "saved_activation_bytes": kept.size_bytes,
            }
        )
        for entry, weight, kept in zip(
            case.profile.layers, case.profile.parameters, case.profile.storages, strict=True
        )
    )
    profile = case.profile.model_copy(update={"layers": layers})
    splits = tuple(draw_splits(draw, profile, degree) for degree in (2, 3))
    devices = tuple(one.model_copy(update={"speed": 1.5}) for one in case.cluster.devices)
    levels = case.cluster.levels
    fast = levels[0].model_copy(update={"bandwidth_bytes_per_s": 10 ** draw.uniform(9.5, 12)})
    cluster = Cluster(devices=devices, levels=(fast, *levels[1:]))
    update = {"tensor": "auto", "num_microbatches": draw.choice([1, 2, 2, 3, 4, 8])}
    options = case.options.model_copy(update=update)
    return Case(case.name, profile.model_copy(update={"splits": splits}), cluster, options)


def list_reduced(case: Case) -> list[Case]:
    """Return the case for every degree, groups of devices as one device each."""
    found = [case]
    for split in case.profile.splits if case.options.tensor == "auto" else ():
        try:
            profile, cluster = reduce_problem(case.profile, case.cluster, split.degree)
        except ValueError:  # no group of so many equal devices
            continue
        found.append(Case(case.name, profile, cluster, case.options))
    return found


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
    tensor: int


def judge(case: Case) -> Outcome | None:
    """Enumerate and plan one case; `None` if there are too many plans."""
    best_s, count = math.inf, 0
    for reduced in list_reduced(case):
        found = SharedEnumeration(reduced)
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
        tuple(stage.strategy for stage in made.stages), made.stages[0].tensor,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=1000, help="cases judged")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one drawn")
    parser.add_argument("--tensor", action="store_true", help="layers may be split, too")
    arguments = parser.parse_args()
    found: list[Outcome] = []
    seed, failures = arguments.first, 0
    while len(found) < arguments.count:
        outcome = judge((draw_split_case if arguments.tensor else draw_case)(seed))
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
    split = sum(entry.tensor > 1 for entry in found)
    print(
        f"{len(found)} cases, {shared} planned with shared state, {split} with split layers; "
        f"best in {best} "
        f"({best / len(found):.2%}), worst miss "
        f"{max(entry.step_s / entry.best_s - 1 for entry in found):.2%}, printed gap median "
        f"{statistics.median(entry.step_s / entry.bound_s - 1 for entry in found):.2%}"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
