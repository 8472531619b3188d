"""What is said of the end of a process, and that lack of memory is said only when it was that."""

import subprocess
import sys

import pytest

from stagewright.core import process_exit
from stagewright.core.process_exit import count_memory_kills, describe_exit


@pytest.fixture
def counters(tmp_path, monkeypatch):
    """A file in the place of the system's counters."""
    path = tmp_path / "vmstat"
    monkeypatch.setattr(process_exit, "EVENTS", path)
    return path


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (1, "ended with exit code 1"),
        (0, "ended with exit code 0"),
        (-9, "was ended by SIGKILL (signal 9)"),
        (137, "was ended by SIGKILL (signal 9)"),
        (-11, "was ended by SIGSEGV (signal 11)"),
        (134, "was ended by SIGABRT (signal 6)"),
        (255, "ended with exit code 255"),
    ],
)
def test_an_end_is_told_by_signal_or_exit_code(code, said, counters):
    counters.write_text("nr_free_pages 1\noom_kill 3\n")
    assert describe_exit(code, 3) == said


def test_lack_of_memory_is_said_of_a_kill_that_the_system_counted(counters):
    counters.write_text("nr_free_pages 1\noom_kill 3\n")
    before = count_memory_kills()
    counters.write_text("nr_free_pages 1\noom_kill 4\n")
    assert describe_exit(-9, before) == "was killed by the system for lack of memory"
    assert "memory" not in describe_exit(-15, before)
    assert "memory" not in describe_exit(1, before)


def test_where_nothing_is_counted_nothing_is_blamed(counters):
    assert count_memory_kills() == 0
    assert "memory" not in describe_exit(-9, 0)
    counters.write_text("nr_free_pages 1\n")
    assert count_memory_kills() == 0


def test_a_real_kill_is_not_taken_for_lack_of_memory():
    before = count_memory_kills()
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    code = subprocess.run([sys.executable, "-c", kill], check=False).returncode
    assert describe_exit(code, before) == "was ended by SIGKILL (signal 9)"
