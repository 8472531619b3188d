"""Capture many architectures and compare each captured model with the original.

    python benchmarks/capture.py --write docs/evidence/capture.md
    python benchmarks/capture.py --drawn 60 --timm 20 --write docs/evidence/capture.md

The second line judges randomly drawn architectures, in a table of their own. Each architecture
of `benchmarks/zoo` is captured and compared with eager in a process of its own. Exits with 1 if one
is silently wrong or crashes, or if fewer than nine in ten of the chosen ones are equal.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch._dynamo  # imported before the fork: seconds, once instead of per architecture
from rich.console import Console
from rich.progress import Progress
from tables import write_between_marks
from zoo.architecture import DRAWN, Architecture
from zoo.judge import judge
from zoo.row import Row
from zoo.table import table
from zoo.zoo import ZOO

from stagewright.capture.capture import trace

AT_ONCE = 2
TIME_LIMIT_S = 180.0
MEMORY_BYTES = 12 * 2**30
LEAST_SHARE_EQUAL = 0.9
LESS = ("equal in training", "refused", "WRONG", "failed")


def work(architecture: Architecture, answer: Connection) -> None:
    """Measure one row, in a child."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    answer.send(judge(architecture, trace))


def rows(
    architectures: Iterable[Architecture], at_once: int, limit_s: float, wanted: float = math.inf
) -> Iterator[Row]:
    """One row an architecture as they get done, each from a process of its own.

    Those that are not built do not count among the ``wanted`` ones: others take their place.
    """
    context = multiprocessing.get_context("fork")
    waiting, built = iter(architectures), 0
    running: dict[Connection, tuple[Architecture, multiprocessing.process.BaseProcess, float]] = {}
    while True:
        while len(running) < at_once and built + len(running) < wanted:
            architecture = next(waiting, None)
            if architecture is None:
                break
            receiver, sender = context.Pipe(duplex=False)
            child = context.Process(target=work, args=(architecture, sender), daemon=True)
            child.start()
            sender.close()
            running[receiver] = (architecture, child, time.monotonic() + limit_s)
        if not running:
            return
        ready = wait(list(running), timeout=1.0)
        for receiver, (architecture, child, deadline) in list(running.items()):
            if receiver in ready or time.monotonic() > deadline:
                row = _collect(architecture, child, receiver, late=receiver not in ready)
                del running[receiver]
                built += row.verdict != "not built"
                yield row


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


def drawn(models: int, nets: int) -> list[tuple[list[Architecture], int]]:
    """Return the drawn orders of architectures, and how many of each that build are wanted."""
    orders: list[tuple[list[Architecture], int]] = []
    if models:
        from zoo.drawn import draw as draw_models

        orders.append((list(draw_models(list(ZOO))), models))
    if nets:
        from zoo.timm_nets import draw as draw_nets

        orders.append((list(draw_nets()), nets))
    return orders


def chosen(names: str | None) -> list[Architecture]:
    if not names:
        return list(ZOO.values())
    unknown = [name for name in names.split(",") if name not in ZOO]
    if unknown:
        raise SystemExit(f"no architecture {', '.join(unknown)}; there are {', '.join(ZOO)}")
    return [ZOO[name] for name in names.split(",")]


def counted(found: Sequence[Row]) -> list[Row]:
    """Those of which nine in ten must be equal: all but the hostile and the drawn ones."""
    return [row for row in found if row.kind not in ("hostile", *DRAWN)]


def summary(found: Sequence[Row]) -> str:
    groups = {
        "architectures": counted(found),
        "hostile ones": [row for row in found if row.kind == "hostile"],
        "drawn from `transformers`": [row for row in found if row.kind == "drawn"],
        "drawn from `timm`": [row for row in found if row.kind == "timm"],
    }
    return "; ".join(_tally(those, what) for what, those in groups.items() if those)


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
    parser.add_argument("--drawn", type=int, default=0, help="number drawn from transformers")
    parser.add_argument("--timm", type=int, default=0, help="number drawn from timm")
    parser.add_argument("--rows", type=Path, help="keep rows here, and judge none of them again")
    parser.add_argument("--write", type=Path, help="replace the table in this document")
    parser.add_argument("--json", action="store_true", help="one object an architecture")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="processes side by side")
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_S, help="seconds for each")
    arguments = parser.parse_args()
    is_drawn = bool(arguments.drawn or arguments.timm)
    orders: Sequence[tuple[list[Architecture], float]] = (
        drawn(arguments.drawn, arguments.timm) if is_drawn else [(chosen(arguments.only), math.inf)]
    )
    judged = read_rows(arguments.rows)
    found = []
    with Progress(console=Console(stderr=True), auto_refresh=False) as progress:
        total = sum(min(len(order), wanted) for order, wanted in orders)
        task = progress.add_task("capturing", total=total)
        for order, wanted in orders:
            done = [judged[one.name] for one in order if one.name in judged]
            places = {architecture.name: place for place, architecture in enumerate(order)}
            wanted -= sum(row.verdict != "not built" for row in done)
            rest = [one for one in order if one.name not in judged]
            for row in rows(rest, arguments.at_once, arguments.time_limit, wanted):
                done.append(row)
                progress.update(task, advance=1, description=row.name, refresh=True)
                if arguments.json:
                    print(json.dumps(row.to_dict()), flush=True)
                if arguments.rows:
                    with arguments.rows.open("a", encoding="utf-8") as file:
                        print(json.dumps(row.to_dict()), file=file)
            found += sorted(done, key=lambda row: places[row.name])
    passed_over = sum(row.verdict == "not built" for row in found)
    found = [row for row in found if row.verdict != "not built"]
    also = f" {passed_over} drawn ones were passed over: they do not build small." * is_drawn
    text = f"{summary(found)}.{also}\n\n{table(found)}"
    if not arguments.json:
        print(text)
    if arguments.write:
        write_between_marks(arguments.write, "capture.py" + " --drawn" * is_drawn, text)
    print(summary(found), file=sys.stderr)
    return 0 if is_kept(found) else 1


def read_rows(path: Path | None) -> dict[str, Row]:
    """Return the rows that an earlier run left in a file, by architecture."""
    if path is None or not path.exists():
        return {}
    found = [Row(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row.name: row for row in found}


if __name__ == "__main__":
    sys.exit(main())
