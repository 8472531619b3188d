"""The profiles published with PipeDream, planned: values, bounds and the time it takes.

``python benchmarks/pipedream.py FOLDER --machines 4 4 --bandwidths 16e9 1.25e9 --json`` prints one
JSON object a line for every profile in the folder; ``--all-columns`` runs four clusters. With
``--expected expected.json`` values are compared with another optimizer's; a difference exits 1.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stagewright.core.errors import InvalidInput, StagewrightError
from stagewright.formats.pipedream_graph import (
    PipeDreamGraph,
    read_pipedream_graph,
    to_cost_graph,
)
from stagewright.planner.pipedream import (
    PipeDreamStage,
    pipedream_levels,
    pipedream_value,
    split_states,
)
from stagewright.planner.pipedream_states import graph_states

TOLERANCE = 1e-9
"""Relative difference from an expected value that is put down to rounding."""


@dataclass(frozen=True)
class Column:
    """A cluster: machines per level and the links between them, the lowest level first."""

    name: str
    machines: tuple[int, ...]
    bandwidths_bytes_per_s: tuple[float, ...]


COLUMNS = (
    Column("n4", (4,), (1e9,)),
    Column("n16", (16,), (1e9,)),
    Column("[4,4]", (4, 4), (16e9, 1.25e9)),
    Column("[8,2]", (8, 2), (25e9, 3.125e9)),
)


@dataclass(frozen=True)
class Result:
    """What an objective's solver found for one profile on one cluster."""

    profile: str
    column: Column
    time_s: float
    lower_bound_s: float
    solve_s: float
    stages: tuple[dict[str, Any], ...]

    @property
    def gap(self) -> float:
        return (self.time_s - self.lower_bound_s) / self.time_s if self.time_s else 0.0


def solve_pipedream(name: str, profile: PipeDreamGraph, columns: Sequence[Column]) -> list[Result]:
    """PipeDream's own objective; the value is derived again from each split by its formula.

    Listing the states is part of the first column's ``solve_s``, the second derivation of none.
    """
    results = []
    begin_s = time.perf_counter()
    graph = to_cost_graph(profile)
    states = graph_states(graph)
    for column in columns:
        machines, bandwidths = column.machines, column.bandwidths_bytes_per_s
        split = split_states(graph, states, pipedream_levels(machines, bandwidths))
        solve_s = time.perf_counter() - begin_s
        value_s = pipedream_value(graph, split.stages, machines, bandwidths)
        if not math.isclose(value_s, split.value_s, rel_tol=TOLERANCE):
            raise AssertionError(f"{name}: the split costs {value_s}, not {split.value_s}")
        results.append(
            Result(
                profile=name,
                column=column,
                time_s=split.value_s,
                lower_bound_s=split.lower_bound_s,
                solve_s=solve_s,
                stages=tuple(stage_as_json(stage) for stage in split.stages),
            )
        )
        begin_s = time.perf_counter()
    return results


def stage_as_json(stage: PipeDreamStage) -> dict[str, Any]:
    document: dict[str, Any] = {"nodes": list(stage.node_ids), "replicas": stage.replicas}
    if stage.inner:
        document["stages"] = [stage_as_json(inner) for inner in stage.inner]
    return document


OBJECTIVES: dict[str, Callable[[str, PipeDreamGraph, Sequence[Column]], list[Result]]] = {
    "pipedream": solve_pipedream,
}
"""By the name ``--objective`` takes: profile name, profile and clusters to one result a cluster."""


def profiles(folder: Path) -> Iterator[tuple[str, PipeDreamGraph]]:
    """Every ``*.txt`` file of a folder, by name; a README is passed over."""
    files = sorted(path for path in folder.glob("*.txt") if path.stem.lower() != "readme")
    if not files:
        raise InvalidInput(f"{folder} holds no *.txt profile")
    for path in files:
        yield path.stem, read_pipedream_graph(path)


def differences(results: Sequence[Result], path: Path) -> list[str]:
    """Where the values are not the expected ones, among those the file has."""
    expected = {
        (
            entry["profile"],
            tuple(entry["machines"]),
            tuple(entry["bandwidths_bytes_per_s"]),
        ): entry["time_s"]
        for entry in json.loads(path.read_text())
    }
    compared, faults = 0, []
    for result in results:
        column = result.column
        wanted_s = expected.get((result.profile, column.machines, column.bandwidths_bytes_per_s))
        if wanted_s is None:
            continue
        compared += 1
        if not math.isclose(result.time_s, wanted_s, rel_tol=TOLERANCE):
            faults.append(
                f"{result.profile} {column.name}: {result.time_s!r}, expected {wanted_s!r}"
            )
    print(f"{compared} values compared, {len(faults)} differ", file=sys.stderr)
    return faults


def show(results: Sequence[Result]) -> None:
    print(f"{'profile':<16}{'cluster':<10}{'seconds':>12}{'gap':>10}{'solved in':>11}  replicas")
    for result in results:
        replicas = "-".join(str(stage["replicas"]) for stage in result.stages)
        print(
            f"{result.profile:<16}{result.column.name:<10}{result.time_s:>12.6g}{result.gap:>10.1e}"
            f"{result.solve_s:>9.3f} s  {replicas}"
        )


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="holds profiles as PipeDream writes them, *.txt")
    parser.add_argument("--machines", type=int, nargs="+", help="per level, the lowest first")
    parser.add_argument("--bandwidths", type=float, nargs="+", help="bytes/s per level")
    parser.add_argument("--all-columns", action="store_true", help="four clusters, and the total")
    parser.add_argument("--objective", choices=sorted(OBJECTIVES), default="pipedream")
    parser.add_argument("--expected", type=Path, help="JSON list of values to compare with")
    parser.add_argument("--json", action="store_true", help="one object a line")
    options = parser.parse_args(arguments)
    if options.all_columns == bool(options.machines or options.bandwidths):
        parser.error("give either --machines and --bandwidths, or --all-columns")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    if options.all_columns:
        columns: tuple[Column, ...] = COLUMNS
    else:
        machines, bandwidths = tuple(options.machines or ()), tuple(options.bandwidths or ())
        columns = (Column(str(list(machines)).replace(" ", ""), machines, bandwidths),)
    try:
        for column in columns:
            pipedream_levels(column.machines, column.bandwidths_bytes_per_s)
        begin_s = time.perf_counter()
        results = []
        for name, profile in profiles(options.folder):
            results += OBJECTIVES[options.objective](name, profile, columns)
        total_s = time.perf_counter() - begin_s
    except StagewrightError as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        for result in results:
            print(json.dumps(as_json(result)))
    else:
        show(results)
    if options.all_columns:
        print(f"{total_s:.2f} s for all", file=sys.stderr if options.json else sys.stdout)
    faults = differences(results, options.expected) if options.expected else []
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


def as_json(result: Result) -> dict[str, Any]:
    return {
        "profile": result.profile,
        "machines": list(result.column.machines),
        "bandwidths_bytes_per_s": list(result.column.bandwidths_bytes_per_s),
        "time_s": result.time_s,
        "lower_bound_s": result.lower_bound_s,
        "gap": result.gap,
        "solve_s": result.solve_s,
        "stages": list(result.stages),
    }


if __name__ == "__main__":
    sys.exit(main())
