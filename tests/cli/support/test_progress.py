"""What is shown while something takes long."""

import io
import sys
import time
from contextlib import redirect_stderr

from stagewright.cli.support import progress
from stagewright.planner.problem.problem import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_line_every_few_seconds_where_nothing_can_be_drawn(monkeypatch):
    """Cause: torch.export ran with stderr redirected, and the lines went into its buffer."""
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.02)
    with progress.planning_progress("step_time", quiet=False) as callback:
        callback(Progress(0.1, 0.5))
        with redirect_stderr(io.StringIO()) as elsewhere:
            until = time.monotonic() + 20
            while stderr.getvalue().count("\n") < 3 and time.monotonic() < until:
                time.sleep(0.01)
    assert "planning: 500 ms so far (0 s)\n" in stderr.getvalue()
    assert not elsewhere.getvalue()


def test_what_is_quick_says_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress.working("estimating"):
        pass
    assert not sys.stderr.getvalue()


def test_nothing_is_shown_where_quiet_was_asked_for(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress.planning_progress("step_time", quiet=True) as callback:
        assert callback is None


def test_a_plan_that_is_quick_shows_nothing(monkeypatch):
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(progress, "DISPLAY_DELAY_S", 1000)
    with progress.planning_progress("step_time", quiet=False) as callback:
        callback(Progress(0.1, 0.5))
    assert "planning" not in stderr.getvalue()


def test_after_a_moment_the_best_so_far_is_shown(monkeypatch):
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(progress, "DISPLAY_DELAY_S", 0)
    with progress.planning_progress("step_time", quiet=False) as callback:
        callback(Progress(0.1, 0.5, 0.4))
        until = time.monotonic() + 20
        while "500 ms so far" not in stderr.getvalue() and time.monotonic() < until:
            time.sleep(0.01)
    assert "planning: 500 ms so far, lower bound 400 ms" in stderr.getvalue()


def test_values_have_the_unit_of_the_objective():
    assert progress.best_so_far("memory", Progress(0.1, 2**20)) == "planning: 1.0 MiB so far"
    assert progress.best_so_far("devices", Progress(0.1, 3.0)) == "planning: 3 so far"
