"""Forwards over several processes: the model's outputs, own errors, and lost ranks named."""

import json
import signal
import sys

import pytest

from examples.inference import main
from tests.runtime.forked import run_as_on_nccl
from tests.runtime.inference_worker import write_profile

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]

SCENARIOS = [
    ("serve", -1, 60),
    ("kill", 0, 60),
    ("kill", 1, 60),
    ("hang", 1, 15),  # also the time to join the group, which a busy machine needs
    ("example", -1, 60),
]


@pytest.fixture(scope="module")
def said(forking_executable):
    """What all ranks of all scenarios said."""
    output = run_as_on_nccl(
        forking_executable, "tests.runtime.inference_worker", json.dumps(SCENARIOS), timeout_s=160
    )
    found = [
        json.loads(line) if line.startswith("{") else {"what": "printed", "line": line}
        for line in output.splitlines()
    ]
    served = next(entry for entry in found if entry["what"] == "ended" and entry["of"] == "serve")
    assert served["codes"] == {"0": 0, "1": 0, "2": 0}
    return found


def of(said, what):
    return [entry for entry in said if entry["what"] == what]


def test_outputs_are_the_unsplit_models_also_over_uneven_replicas(said):
    found = of(said, "equality")
    assert [entry["replicas"] for entry in found] == [[1, 2], [2, 1]]
    assert all(entry["worst"] <= 1e-12 for entry in found), found


def test_an_error_on_another_rank_is_the_requests_own(said):
    (found,) = of(said, "errors")
    assert found["kinds"] == [
        "NoneType", "ArithmeticError", "NoneType", "ArithmeticError", "NoneType",
    ]  # fmt: skip
    assert found["right"]
    assert found["cancelled"]
    notes = "\n".join(found["notes"])
    assert "in stage 1" in notes
    assert "on rank 1" in notes
    assert "in refuse" in notes  # where in the code


def test_rank_0_takes_the_requests(said):
    (found,) = of(said, "other rank")
    assert "only rank 0 accepts requests; on rank 1" in found["error"]


def test_replicas_of_a_layer_that_keeps_state_are_refused(said):
    found = of(said, "state")
    assert len(found) == 3
    assert all("has 3 replicas, each with its own state" in entry["error"] for entry in found)


def test_waiting_for_requests_is_no_failure(said):
    assert [entry["right"] for entry in of(said, "idle")] == [True]


def test_no_thread_is_left(said):
    found = of(said, "threads")
    assert len(found) == 3
    assert not any(entry["names"] for entry in found), found


def accounts(said, what, victim):
    """Exit code and error of every rank of a scenario but the victim."""
    (ended,) = [
        entry for entry in of(said, "ended") if (entry["of"], entry["victim"]) == (what, victim)
    ]
    errors = {
        entry["rank"]: entry["error"]
        for entry in of(said, "failed")
        if (entry["of"], entry["victim"]) == (what, victim)
    }
    return {int(rank): code for rank, code in ended["codes"].items()}, errors


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_named_by_all_others(said, victim):
    codes, errors = accounts(said, "kill", victim)
    others = {0, 1, 2} - {victim}
    assert codes == {victim: -signal.SIGKILL, **dict.fromkeys(others, 7)}
    assert set(errors) == others
    for rank, error in errors.items():
        assert f"rank {victim} (" in error, error
        assert f"rank {rank} was at" in error, error


def test_a_rank_that_does_nothing_is_noticed_within_the_timeout(said):
    codes, errors = accounts(said, "hang", 1)
    assert codes == {0: 7, 2: 7}
    assert "got no answer in time, though every rank is still alive" in errors[0]
    assert "the wait for the result of micro-batch 5" in errors[0]
    assert "rank 2 was at the wait after micro-batch 4 on stage 2" in errors[2]


def test_the_example_serves_over_processes(said):
    (ended,) = [entry for entry in of(said, "ended") if entry["of"] == "example"]
    assert ended["codes"] == {"0": 0, "1": 0, "2": 0}
    (printed,) = of(said, "printed")
    assert "40 requests of 100 samples:" in printed["line"]


def test_the_example_serves_in_one_process(tmp_path, monkeypatch, capsys):
    write_profile(tmp_path / "profile.json")
    monkeypatch.setattr(sys, "argv", ["inference.py", str(tmp_path / "profile.json")])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    main()
    assert "40 requests of 100 samples:" in capsys.readouterr().out
