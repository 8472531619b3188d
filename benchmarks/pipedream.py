"""The profiles published with PipeDream, planned: values, bounds and the time it takes.

    python benchmarks/pipedream.py FOLDER --machines 4 4 --bandwidths 16e9 1.25e9 --json

prints one JSON object a line for every profile in the folder; ``--all-columns`` runs four
clusters. By PipeDream's own objective ``time_s`` is its seconds per minibatch, and with
``--expected expected.json`` values are compared with another optimizer's; a difference exits 1.

``--objective step_time`` and ``throughput`` plan the same files by our objectives, after one plan
that has the machine code ready:

time_s            the plan's simulated step; no plan has one below ``lower_bound_s``
gap               of ``objective_s``, the least found of what was minimised, against
                  ``objective_lower_bound_s``
solve_s           from the file's graph to the plan
pipedream_time_s  the simulated step of PipeDream's own plan, placed as ``pipedream_levels`` says;
                  null, with ``pipedream_reason``, where it cannot be
gain              pipedream_time_s / time_s - 1

A profile that cannot be read or planned, or whose states would take more than ``MAX_BYTES``, is
refused by name on standard error, before memory is spent on it; the others are printed as they are
solved, and the exit code is 3, or 2 where nothing is left.

``--write docs/evidence/pipedream.md --all-columns`` runs every objective and writes the
tables there.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from pipedream_study.document import (
    TOLERANCE,
    Expected,
    document,
    is_equal,
    wanted_s,
)
from pipedream_study.graphs import graph_states, pipedream_value, split_states, to_cost_graph
from pipedream_study.own import solve_own
from pipedream_study.results import COLUMNS, Column, Result, Settings
from tables import write_between_marks

from stagewright.core.errors import InvalidInput, StagewrightError
from stagewright.formats.pipedream_graph import PipeDreamGraph, read_pipedream_graph
from stagewright.planner.pipedream.objective import PipeDreamStage, pipedream_levels
from stagewright.schedules.numba_jit import is_available


def solve_pipedream(
    name: str, profile: PipeDreamGraph, columns: Sequence[Column], settings: Settings
) -> list[Result]:
    """PipeDream's own objective; the value is derived again from each split by its formula.

    It knows none of the settings. Listing the states is part of the first column's ``solve_s``,
    the second derivation of none.
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
                objective="pipedream",
                profile=name,
                column=column,
                time_s=split.value_s,
                lower_bound_s=split.lower_bound_s,
                gap=split.gap,
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


REFUSED = 3
"""Exit code where some profiles were refused."""

Solver = Callable[[str, PipeDreamGraph, Sequence[Column], Settings], list[Result]]

OBJECTIVES: dict[str, Solver] = {
    "pipedream": solve_pipedream,
    "step_time": partial(solve_own, "step_time"),
    "throughput": partial(solve_own, "throughput"),
}
"""By the name ``--objective`` takes: profile name, profile and clusters to one result a cluster."""


Refused = dict[str, str]
"""By profile, why there is no result."""


def profiles(folder: Path) -> tuple[dict[str, PipeDreamGraph], Refused]:
    """Every ``*.txt`` file of a folder, by name, and those that are no profile."""
    files = sorted(path for path in folder.glob("*.txt") if path.stem.lower() != "readme")
    if not files:
        raise InvalidInput(f"{folder} holds no *.txt profile")
    graphs: dict[str, PipeDreamGraph] = {}
    refused: Refused = {}
    for path in files:
        try:
            graphs[path.stem] = read_pipedream_graph(path)
        except StagewrightError as error:
            refused[path.stem] = str(error)
    return graphs, refused


def solved(
    objective: str,
    graphs: Mapping[str, PipeDreamGraph],
    columns: Sequence[Column],
    settings: Settings,
    refused: Refused,
    tell: Callable[[Sequence[Result]], None],
) -> tuple[list[Result], float]:
    """All profiles and clusters, and the seconds all of it took but the warm-up.

    Every profile's results are told at once; those that cannot be solved are ``refused``.
    """
    solver = OBJECTIVES[objective]
    if objective != "pipedream" and is_available():
        warm_up_s = warm_up(solver, graphs, columns[0], settings)
        print(f"{objective}: warmed up in {warm_up_s:.2f} s", file=sys.stderr)
    begin_s = time.perf_counter()
    results: list[Result] = []
    for name, graph in graphs.items():
        try:
            found = solver(name, graph, columns, settings)
        except (StagewrightError, MemoryError) as error:
            refused[f"{name}, {objective}"] = str(error) or "out of memory"
            continue
        tell(found)
        results += found
    return results, time.perf_counter() - begin_s


def warm_up(
    solver: Solver, graphs: Mapping[str, PipeDreamGraph], column: Column, settings: Settings
) -> float:
    """Plan the largest profile once, to have machine code compiled or read; how long that takes."""
    begin_s = time.perf_counter()
    # Loaded first, so that all the kernels this plan uses are compiled, not the long ones only.
    importlib.import_module("numba")
    name, largest = max(graphs.items(), key=lambda entry: len(entry[1].nodes))
    with suppress(StagewrightError):  # refused when its turn comes
        solver(name, largest, (column,), settings)
    return time.perf_counter() - begin_s


def read_expected(path: Path | None) -> Expected:
    """Values by profile and cluster; none without a file."""
    if path is None:
        return {}
    return {
        (
            entry["profile"],
            tuple(entry["machines"]),
            tuple(entry["bandwidths_bytes_per_s"]),
        ): entry["time_s"]
        for entry in json.loads(path.read_text(encoding="utf-8"))
    }


def differences(results: Sequence[Result], expected: Expected) -> list[str]:
    """Return the expected values that were not obtained."""
    compared, faults = 0, []
    for result in results:
        wanted = wanted_s(expected, result)
        if wanted is None:
            continue
        compared += 1
        if not is_equal(result.time_s, wanted):
            faults.append(
                f"{result.profile} {result.column.name}: {result.time_s!r}, expected {wanted!r}"
            )
    print(f"{compared} values compared, {len(faults)} differ", file=sys.stderr)
    return faults


def show_head(objective: str) -> None:
    """Print the heading of an objective's table."""
    more = "" if objective == "pipedream" else f"{'PipeDream':>12}{'gain':>8}"
    print(
        f"{'profile':<16}{'cluster':<10}{'seconds':>12}{more}{'gap':>10}{'solved in':>11}  replicas"
    )


def show(results: Sequence[Result], *, as_json: bool) -> None:
    """Print rows of a table, or one object a line."""
    if as_json:
        for result in results:
            print(json.dumps(result.as_json()), flush=True)
        return
    more = ""
    for result in results:
        replicas = "-".join(str(stage["replicas"]) for stage in result.stages)
        if result.own is not None:
            theirs_s, gain = result.own.pipedream.time_s, result.gain
            more = f"{'none' if theirs_s is None else format(theirs_s, '.6g'):>12}"
            more += f"{'' if gain is None else format(gain, '.1%'):>8}"
        print(
            f"{result.profile:<16}{result.column.name:<10}{result.time_s:>12.6g}{more}"
            f"{result.gap:>10.1e}{result.solve_s:>9.3f} s  {replicas}",
            flush=True,
        )


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="holds profiles as PipeDream writes them, *.txt")
    parser.add_argument("--machines", type=int, nargs="+", help="per level, the lowest first")
    parser.add_argument("--bandwidths", type=float, nargs="+", help="bytes/s per level")
    parser.add_argument("--all-columns", action="store_true", help="four clusters, and the total")
    parser.add_argument("--objective", choices=sorted(OBJECTIVES), help="default: pipedream")
    parser.add_argument("--expected", type=Path, help="JSON list of PipeDream's values")
    parser.add_argument("--json", action="store_true", help="one object a line")
    parser.add_argument("--write", type=Path, help="replace the tables in this document")
    own = parser.add_argument_group("for our own objectives")
    own.add_argument("--microbatches", type=int, help="a step; default: 4 x devices")
    own.add_argument("--memory-gb", type=float, help="of each device; default: no limit")
    own.add_argument("--latency", type=float, default=0.0, help="of every link, seconds")
    own.add_argument("--gap", type=float, default=1e-4, help="good enough, relatively")
    options = parser.parse_args(arguments)
    if options.all_columns == bool(options.machines or options.bandwidths):
        parser.error("give either --machines and --bandwidths, or --all-columns")
    if options.write and (options.objective or not options.all_columns):
        parser.error("--write takes --all-columns and runs every objective; leave --objective out")
    if options.expected and options.objective in ("step_time", "throughput"):
        parser.error("--expected are values of PipeDream's objective")
    if options.microbatches is not None and not 1 <= options.microbatches <= 2**20:
        parser.error("--microbatches is between 1 and 2**20")
    if options.memory_gb is not None and not 0 <= options.memory_gb <= 1e9:
        parser.error("--memory-gb is between 0 and 1e9")
    if not (math.isfinite(options.latency) and options.latency >= 0):
        parser.error("--latency is finite and not negative")
    if not 0 <= options.gap <= 1:
        parser.error("--gap is between 0 and 1")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    if options.all_columns:
        columns: tuple[Column, ...] = COLUMNS
    else:
        machines, bandwidths = tuple(options.machines or ()), tuple(options.bandwidths or ())
        columns = (Column(str(list(machines)).replace(" ", ""), machines, bandwidths),)
    memory_gb = options.memory_gb
    settings = Settings(
        options.microbatches,
        options.latency,
        None if memory_gb is None else round(memory_gb * 1e9),
        options.gap,
    )
    objectives = tuple(OBJECTIVES) if options.write else (options.objective or "pipedream",)
    try:
        for column in columns:
            pipedream_levels(column.machines, column.bandwidths_bytes_per_s)
        (graphs, refused), expected = profiles(options.folder), read_expected(options.expected)
        found = {}
        tell = partial(show, as_json=options.json)
        for objective in objectives if graphs else ():
            if not options.json:
                show_head(objective)
            found[objective], total_s = solved(objective, graphs, columns, settings, refused, tell)
            if options.all_columns:
                print(f"{total_s:.2f} s for all", file=sys.stderr if options.json else sys.stdout)
        for name, reason in refused.items():
            print(f"refused: {name}: {reason}", file=sys.stderr)
        if options.write and not refused:
            write_between_marks(options.write, "pipedream.py", document(found, expected))
    except StagewrightError as error:
        print(error, file=sys.stderr)
        return 2
    faults = differences(found.get("pipedream", ()), expected) if options.expected else []
    for fault in faults:
        print(fault, file=sys.stderr)
    if faults:
        return 1
    if not refused:
        return 0
    return REFUSED if any(found.values()) else 2


if __name__ == "__main__":
    sys.exit(main())
