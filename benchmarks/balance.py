"""Our balance against torchgpipe's own solver, on the same cost vectors.

Run with ``pip install torchgpipe`` beside stagewright; every figure quoted elsewhere comes from
here. Exits 1 if ours ever has a larger largest part, or differs from brute force.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from math import comb
from typing import Any

from torchgpipe.balance.blockpartition import solve

from stagewright.planner.heuristics.chain_partition import balance

BRUTE_FORCE_SPLITS = 3_000
"""Vectors with at most this many splits are checked against all of them."""

PARTS = (2, 4, 8)
LAYERS = (16, 24, 32, 48, 64)


def cost_vectors(count: int) -> Iterator[tuple[str, list[float], int]]:
    """Seeded vectors of four shapes, each with a number of parts."""
    for seed in range(count):
        draw = random.Random(seed)
        num_layers, num_parts = draw.choice(LAYERS), draw.choice(PARTS)
        shape = ("lognormal", "uniform", "decaying", "heavy head")[seed % 4]
        if shape == "lognormal":
            costs = [draw.lognormvariate(0, 1) for _ in range(num_layers)]
        elif shape == "uniform":
            costs = [draw.uniform(0.5, 1.5) for _ in range(num_layers)]
        elif shape == "decaying":
            costs = [0.93**index * draw.uniform(0.8, 1.2) for index in range(num_layers)]
        else:
            costs = [draw.uniform(0.9, 1.1) for _ in range(num_layers)]
            costs[-1] = num_layers / num_parts * draw.uniform(0.3, 1.5)
        yield shape, costs, num_parts


def largest_part(costs: Sequence[float], counts: Sequence[int]) -> float:
    """Cost of the largest part, summed alike for every solver."""
    cuts = [0]
    for size in counts:
        cuts.append(cuts[-1] + size)
    return max(sum(costs[first:last]) for first, last in pairwise(cuts))


def least_largest_part(costs: Sequence[float], num_parts: int) -> float:
    """Find the best split by trying every one."""
    inner = combinations(range(1, len(costs)), num_parts - 1)
    splits = ([0, *cuts, len(costs)] for cuts in inner)
    return min(largest_part(costs, [b - a for a, b in pairwise(cuts)]) for cuts in splits)


def compare(count: int) -> dict[str, Any]:
    gains: dict[str, list[float]] = {}
    ours_s, theirs_s = [], []
    worse = wrong = brute_forced = 0
    for shape, costs, num_parts in cost_vectors(count):
        begin_s = time.perf_counter()
        our_counts = balance(costs, num_parts)
        middle_s = time.perf_counter()
        their_counts = [len(block) for block in solve(costs, num_parts)]
        end_s = time.perf_counter()
        ours_s.append(middle_s - begin_s)
        theirs_s.append(end_s - middle_s)
        ours, theirs = largest_part(costs, our_counts), largest_part(costs, their_counts)
        worse += ours > theirs * (1 + 1e-12)
        gains.setdefault(shape, []).append(theirs / ours - 1 if theirs > ours * (1 + 1e-12) else 0)
        if comb(len(costs) - 1, num_parts - 1) <= BRUTE_FORCE_SPLITS:
            brute_forced += 1
            wrong += abs(ours / least_largest_part(costs, num_parts) - 1) > 1e-12
    every = [gain for shape_gains in gains.values() for gain in shape_gains]
    return {
        "vectors": len(every),
        "worse": worse,
        "better": sum(gain > 0 for gain in every),
        "mean_gain": statistics.mean(every),
        "max_gain": max(every),
        "mean_gain_where_better": statistics.mean([gain for gain in every if gain > 0] or [0.0]),
        "brute_forced": brute_forced,
        "differs_from_brute_force": wrong,
        "median_ours_s": statistics.median(ours_s),
        "median_torchgpipe_s": statistics.median(theirs_s),
        "by_shape": {
            shape: {
                "vectors": len(shape_gains),
                "better": sum(gain > 0 for gain in shape_gains),
                "mean_gain": statistics.mean(shape_gains),
                "max_gain": max(shape_gains),
            }
            for shape, shape_gains in sorted(gains.items())
        },
    }


def summary(result: dict[str, Any]) -> str:
    lines = [
        "{vectors} cost vectors: ours better {better}, equal otherwise, worse {worse}".format(
            **result
        ),
        "torchgpipe's largest part is {mean_gain:.2%} larger than ours on average, "
        "{mean_gain_where_better:.2%} where ours is better, {max_gain:.1%} at most".format(
            **result
        ),
        "{brute_forced} checked against every split, {differs_from_brute_force} differ".format(
            **result
        ),
        f"median time {result['median_ours_s'] * 1e3:.3f} ms, "
        f"torchgpipe {result['median_torchgpipe_s'] * 1e3:.3f} ms",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--vectors", type=int, default=1000)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args()
    result = compare(arguments.vectors)
    print(json.dumps(result, indent=2) if arguments.json else summary(result))
    return 1 if result["worse"] or result["differs_from_brute_force"] else 0


if __name__ == "__main__":
    sys.exit(main())
