"""Capture many architectures and compare each captured model with the original.

    python benchmarks/capture.py --write docs/capture.md

Each architecture of `benchmarks/zoo` is captured and compared with eager in a process of its own.
Exits with 1 if one is silently wrong or crashes, or if fewer than nine in ten are equal.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch._dynamo  # imported before the fork: seconds, once instead of per architecture
from rich.console import Console
from rich.progress import Progress
from tables import write_between_marks
from zoo.architecture import Architecture
from zoo.judge import judge
from zoo.row import Row
from zoo.table import table
from zoo.zoo import ZOO

from stagewright.capture.capture import trace

AT_ONCE = 2
TIME_LIMIT_S = 180.0
LEAST_SHARE_EQUAL = 0.9
LESS = ("equal in training", "refused", "WRONG", "failed")


def work(architecture: Architecture, answer: Connection) -> None:
    """Measure one row, in a child."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    answer.send(judge(architecture, trace))


def rows(architectures: Sequence[Architecture], at_once: int, limit_s: float) -> Iterator[Row]:
    """One row an architecture as they get done, each from a process of its own."""
    context = multiprocessing.get_context("fork")
    waiting = list(reversed(architectures))
    running: dict[Connection, tuple[Architecture, multiprocessing.process.BaseProcess, float]] = {}
    while waiting or running:
        while waiting and len(running) < at_once:
            receiver, sender = context.Pipe(duplex=False)
            child = context.Process(target=work, args=(waiting[-1], sender), daemon=True)
            child.start()
            sender.close()
            running[receiver] = (waiting.pop(), child, time.monotonic() + limit_s)
        ready = wait(list(running), timeout=1.0)
        for receiver, (architecture, child, deadline) in list(running.items()):
            if receiver in ready or time.monotonic() > deadline:
                yield _collect(architecture, child, receiver, late=receiver not in ready)
                del running[receiver]


def _collect(
    architecture: Architecture,
    child: multiprocessing.process.BaseProcess,
    receiver: Connection,
    *,
    late: bool,
) -> Row:
    row = Row(architecture.name, architecture.kind, architecture.trap)
    if late:
        child.kill()
        row.reason = "still running when its time was up"
    else:
        try:
            row = receiver.recv()
        except EOFError:
            child.join()
            row.reason = f"its process ended with {child.exitcode}"
    child.join()
    receiver.close()
    return row


def chosen(names: str | None) -> list[Architecture]:
    if not names:
        return list(ZOO.values())
    unknown = [name for name in names.split(",") if name not in ZOO]
    if unknown:
        raise SystemExit(f"no architecture {', '.join(unknown)}; there are {', '.join(ZOO)}")
    return [ZOO[name] for name in names.split(",")]


def counted(found: Sequence[Row]) -> list[Row]:
    """Those of which nine in ten must be equal: all but the hostile ones."""
    return [row for row in found if row.kind != "hostile"]


def summary(found: Sequence[Row]) -> str:
    hostile = [row for row in found if row.kind == "hostile"]
    parts = [_tally(counted(found), "architectures")] if counted(found) else []
    return "; ".join([*parts, _tally(hostile, "hostile ones")] if hostile else parts)


def _tally(found: Sequence[Row], what: str) -> str:
    count = Counter(row.verdict for row in found)
    equal = sum(row.is_equal for row in found)
    opaque = count["equal, with opaque layers"]
    whole = sum(row.is_equal and row.mode == "modules" for row in found)
    rest = ", ".join(f"{count[verdict]} {verdict}" for verdict in LESS)
    return (
        f"{equal} of {len(found)} {what} equal ({opaque} of them with opaque layers, of which "
        f"{whole} are one opaque layer as a whole), {rest}"
    )


def is_kept(found: Sequence[Row]) -> bool:
    """None silently wrong, none crashed, and at least nine in ten of those counted equal."""
    loud = all(row.verdict not in ("WRONG", "failed") for row in found)
    judged = counted(found)
    return loud and sum(row.is_equal for row in judged) >= LEAST_SHARE_EQUAL * len(judged)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", metavar="NAME,...", help="these architectures")
    parser.add_argument("--write", type=Path, help="replace the table in this document")
    parser.add_argument("--json", action="store_true", help="one object an architecture")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="processes side by side")
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_S, help="seconds for each")
    arguments = parser.parse_args()
    architectures = chosen(arguments.only)
    found = []
    with Progress(console=Console(stderr=True), auto_refresh=False) as progress:
        task = progress.add_task("capturing", total=len(architectures))
        for row in rows(architectures, arguments.at_once, arguments.time_limit):
            found.append(row)
            progress.update(task, advance=1, description=row.name, refresh=True)
            if arguments.json:
                print(json.dumps(row.to_dict()), flush=True)
    order = list(ZOO)
    found.sort(key=lambda row: order.index(row.name))
    text = f"{summary(found)}.\n\n{table(found)}"
    if not arguments.json:
        print(text)
    if arguments.write:
        write_between_marks(arguments.write, "capture.py", text)
    print(summary(found), file=sys.stderr)
    return 0 if is_kept(found) else 1


if __name__ == "__main__":
    sys.exit(main())
