"""`benchmarks/planner.py` says what it does, and what is wrong."""

import json
import subprocess
import sys

import pytest

from stagewright.schedules.numba_jit import is_available


def ran(repository, *words):
    return subprocess.run(
        [sys.executable, "benchmarks/planner.py", *map(str, words)],
        cwd=repository,
        capture_output=True,
        text=True,
    )


@pytest.fixture
def repository(request):
    return request.config.rootpath


def test_one_document_on_stdout_and_progress_on_stderr(repository):
    done = ran(repository, "--layers", 6, "--devices", 4, "--repeats", 1, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["numba"] == is_available()
    assert done.stderr.splitlines() == [
        "6 layers over 4 devices: one plan to warm up",
        "plan 1 of 1, then another memory limit",
    ]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--layers", 0], 2, "argument --layers: 0 is not above 0"),
        (["--memory-gb", "nan"], 2, "nan is not above 0"),
        (["--layers", 2, "--devices", 12], 2, "12 devices are no whole nodes of 8"),
        (["--layers", 2, "--devices", 1, "--memory-gb", 0.001], 3, "allows 976.6 KiB"),
    ],
)
def test_what_it_cannot_do_is_an_error_in_words(repository, words, code, said):
    """Cause: no layers ended in a traceback of the profile's validation."""
    done = ran(repository, *words)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr
