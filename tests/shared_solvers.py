"""Solver processes that the services of a test session share, one service after the other.

Services plan in processes, as they are served. A service of each test would start its own: three
of them take a second of processor time, and several thousand tests have a service.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar
from unittest.mock import patch

from stagewright.api import services
from stagewright.api.planning.kernel_compiler import KernelCompiler
from stagewright.api.planning.solver_pool import Solver
from stagewright.api.planning.solver_process import SolverProcess


class SharedSolver(Solver):
    """A solver that begins with processes of services that are closed, and leaves its own."""

    left: ClassVar[list[SolverProcess]] = []
    compiler: ClassVar[KernelCompiler | None] = None

    def __init__(
        self, processes: int, observe: Callable[[str, float], None] = lambda work, duration_s: None
    ) -> None:
        super().__init__(processes, observe)
        if self._idle:
            SharedSolver.compiler = self._compiler = SharedSolver.compiler or KernelCompiler()
        for process in self._idle[::-1]:  # the last one is used first
            if self.left:
                _move(self.left.pop(), process)

    def close(self) -> None:
        """Kill the processes that are busy and leave the others to the next service."""
        for process in self._idle:
            if process.is_started and process.prepare() is not None:
                left = SolverProcess(self._start)
                _move(process, left)
                self.left.append(left)
        self._compiler = None
        super().close()


def _move(source: SolverProcess, target: SolverProcess) -> None:
    """Give the running process of one object to another."""
    for name in ("_pool", "_kills_before", "best", "_imported"):
        mine, theirs = getattr(source, name), getattr(target, name)
        setattr(source, name, theirs)
        setattr(target, name, mine)


@contextmanager
def shared_solvers() -> Iterator[None]:
    """Let the services that begin inside the block share their processes."""
    with patch.object(services, "Solver", SharedSolver):
        yield
