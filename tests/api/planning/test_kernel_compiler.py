"""The planner's loops are compiled by a process of their own, and nobody waits for it."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stagewright.api.planning import kernel_compiler
from stagewright.api.planning.kernel_compiler import KernelCompiler
from stagewright.api.planning.solver_pool import Solver
from stagewright.planner import numba_cache as compiling
from stagewright.planner.search.label_kernel import search_labels
from stagewright.schedules import numba_jit as jit

WITHIN_S = 30


def has_numba() -> tuple[bool, bool]:
    """Run in a solver process: whether small and large problems are planned by compiled loops."""
    kernel = jit.Kernel(search_labels)
    return kernel.pays(0), kernel.pays(1e9)


def until(happens: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WITHIN_S
    while not happens():
        assert time.monotonic() < end_s
        time.sleep(0.02)


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "is_done", lambda: False)


def command(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(kernel_compiler, "COMMAND", (sys.executable, "-c", program))


@pytest.mark.usefixtures("nothing_compiled")
def test_plans_are_found_in_plain_python_until_it_is_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Cause: the first plan after an installation waited half a minute for the compiler.

    Later, a search of a hundred layers compiled for itself, and was killed at its deadline.
    """
    pytest.importorskip("numba")
    end = tmp_path / "end"
    program = f"import os, time\nwhile not os.path.exists({str(end)!r}): time.sleep(0.01)"
    command(monkeypatch, program)
    solver = Solver(1)

    async def main() -> None:
        assert await solver.run(has_numba) == (False, False)
        end.touch()
        end_s = time.monotonic() + WITHIN_S
        while await solver.run(has_numba) != (True, True):
            assert time.monotonic() < end_s
            await asyncio.sleep(0.05)

    try:
        asyncio.run(main())
    finally:
        solver.close()


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize("end", ["raise SystemExit(3)", "os.kill(os.getpid(), 9)"])
def test_one_that_fails_is_told_and_plans_are_found_in_plain_python(
    end: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every solver process would fail as the compiler did, or compile for itself."""
    command(monkeypatch, f"import os; {end}")
    solver = Solver(1)
    try:
        with caplog.at_level(logging.WARNING):
            assert asyncio.run(solver.run(has_numba)) == (False, False)
            until(lambda: "could not be compiled" in caplog.text)
        assert solver._compiler is not None
        assert not solver._compiler.done.value
    finally:
        solver.close()


@pytest.mark.usefixtures("nothing_compiled")
def test_it_ends_with_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    command(monkeypatch, "import time; time.sleep(600)")
    compiler = KernelCompiler()
    compiler.close()
    assert compiler._process is not None
    assert compiler._process.returncode == -signal.SIGKILL
    assert not compiler.done.value
    assert not caplog.text


def test_what_is_compiled_is_remembered_until_the_sources_change(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("numba")
    source = tmp_path / "kernel.py"
    source.write_text("")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kept"))
    monkeypatch.setattr(compiling, "SOURCES", (source,))
    planned = []
    monkeypatch.setattr(compiling, "plan", lambda *asked: planned.append(asked))
    assert not compiling.is_done()
    compiling.compile_all()
    assert len(planned) == len(compiling.ASKED)
    assert compiling.is_done()
    assert KernelCompiler().done.value, "nothing is started"
    source.write_text("changed")
    assert not compiling.is_done()


def test_the_example_can_be_planned_every_way_that_is_asked() -> None:
    profile = compiling.example()
    cluster = compiling.Cluster.uniform(compiling.DEVICES, memory_bytes=compiling.MEMORY_BYTES)
    for options in compiling.ASKED:
        assert sum(compiling.plan(profile, cluster, options).balance) == compiling.LAYERS
