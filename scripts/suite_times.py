"""Run tests in one process; print the processor and wall time of each folder, file and test.

usage: python scripts/suite_times.py [PATH ...] [--slowest N] [--write FILE] [-- PYTEST-OPTION ...]

Processor time is user and system time of the test and of every process it started and waited for:
unlike wall time, it hardly changes when the machine has other work. Wall time far above it is
waiting. A fixture that several tests share counts to the first of them. Set ``OMP_NUM_THREADS=1``,
as ``make test`` does, or idle threads of torch count too.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest


def processor_s() -> float:
    """Return the user and system seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


class Stopwatch:
    """A pytest plugin that adds up processor and wall seconds by test."""

    def __init__(self, slow_log: Path | None) -> None:
        self.cpu: Counter[str] = Counter()
        self.wall: Counter[str] = Counter()
        self._slow_log = slow_log

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Iterator[None]:
        """Count what importing the test files costs to a line of its own."""
        return (yield from self._count("(collection)"))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Count set-up, call and tear-down of a test."""
        return (yield from self._count(item.nodeid))

    def _count(self, name: str) -> Iterator[None]:
        cpu, wall = processor_s(), time.perf_counter()
        try:
            return (yield)
        finally:
            self.cpu[name] += processor_s() - cpu
            self.wall[name] += time.perf_counter() - wall
            if self._slow_log:
                with self._slow_log.open("a") as log:
                    print(f"{self.cpu[name]:.2f}\t{self.wall[name]:.2f}\t{name}", file=log)

    def table(self, depth: int | None, most: int) -> str:
        """Return the most expensive names, those that agree in `depth` parts of the path in one."""
        cpu: Counter[str] = Counter()
        wall: Counter[str] = Counter()
        for name in self.cpu:
            path = name.partition("::")[0]
            short = name if depth is None else "/".join(path.split("/")[:depth])
            cpu[short] += self.cpu[name]
            wall[short] += self.wall[name]
        rows = [f"{cpu[name]:9.1f} {wall[name]:9.1f}  {name}" for name, _ in cpu.most_common(most)]
        return "\n".join(["processor s  wall s", *rows])


def main() -> int:
    """Run the tests asked for and print three tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="*", default=["tests"])
    parser.add_argument("--slowest", type=int, default=40, help="lines of each table")
    parser.add_argument("--write", type=Path, help="append a line a test to this file")
    arguments, options = parser.parse_known_args()
    stopwatch = Stopwatch(arguments.write)
    options = [option for option in options if option != "--"]
    status = pytest.main(["-q", *options, *arguments.paths], plugins=[stopwatch])
    for depth in (2, 9, None):
        print("", stopwatch.table(depth, arguments.slowest), sep="\n")
    print(f"\n{sum(stopwatch.cpu.values()):9.1f} {sum(stopwatch.wall.values()):9.1f}  in all")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
