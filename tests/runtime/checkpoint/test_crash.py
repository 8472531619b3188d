"""Killed while saving, a process leaves what was saved before: at any moment, whatever it did."""

import json
import signal

import pytest

from tests.runtime.checkpoint.crash_worker import CASES
from tests.runtime.forked import run_worker

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


ROUNDS = 5


def deaths(forking_executable, *words):
    worker = "tests.runtime.checkpoint.crash_worker"
    return list(
        map(
            json.loads,
            run_worker(forking_executable, worker, *map(str, words), timeout_s=280).splitlines(),
        )
    )


@pytest.fixture(scope="module")
def killed_in_turn(forking_executable, tmp_path_factory):
    return deaths(forking_executable, "operations", tmp_path_factory.mktemp("operations"))


@pytest.mark.parametrize(("step", "keep"), CASES, ids=["new", "replaced"])
def test_at_every_operation_on_a_file(step, keep, killed_in_turn):
    """Value 2 was saved before, the one killed saves 3, and the next 9."""
    found = [e for e in killed_in_turn if (e["step"], e["keep"]) == (step, keep)]
    assert len(found) > 20
    assert [entry["killed"] for entry in found] == [True] * (len(found) - 1) + [False]
    values = [entry["found"] for entry in found]
    assert set(values) == {2, 3}
    assert values == sorted(values)  # the old one up to some moment, the new one from there on
    for entry in found:
        assert entry["after"] == 9
        steps = [name for name in entry["rest"] if name.startswith("step-")]
        assert not any(name.endswith(".old") for name in steps)
        assert len(steps) == keep
        assert sorted(set(entry["rest"]) - set(steps)) == [".lock", "latest"]


def test_ranks_at_random_moments(forking_executable, tmp_path):
    found = deaths(forking_executable, "random", tmp_path, ROUNDS)
    assert len(found) == ROUNDS
    for entry in found:
        assert entry["found"] >= entry["at once"] >= entry["first"]
        assert set(entry["codes"]) <= {-signal.SIGKILL, 1}
    assert any(1 in entry["codes"] for entry in found)
    left = {path.name for path in (tmp_path / "run").iterdir() if path.name.startswith(".saving")}
    assert len(left) <= 1  # of the last one alone
