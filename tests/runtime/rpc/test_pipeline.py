"""One process in control of passive workers: the same numbers, clear errors, nothing left over."""

import json
import sys

import pytest

from stagewright.profiler.links.launch_local import free_port
from tests.runtime.forked import start_python

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

EXACT = 1e-9
WORLD_SIZE = 3
GAVE_UP, ENDED = 7, 9


def run_session(executable, scenarios):
    """Exit codes, what the master found, and everybody's last words, the master's first."""
    address = f"127.0.0.1:{free_port()}"
    commands = [["tests.runtime.rpc_master", scenarios, address]] + [
        ["tests.runtime.rpc_worker", f"worker{rank}", str(rank), str(WORLD_SIZE), address]
        for rank in range(1, WORLD_SIZE)
    ]
    processes = [start_python(executable, "-m", *command) for command in commands]
    try:
        ended = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    codes = [process.returncode for process in processes]
    found = [json.loads(line) for line in ended[0][0].splitlines()]
    return codes, found, [words for _, words in ended]


@pytest.fixture(scope="module")
def session(forking_executable):
    codes, found, words = run_session(forking_executable, "equality,overlap,errors")
    assert codes == [0, 0, 0], words
    return found


def of(session, scenario):
    return [entry for entry in session if entry["scenario"] == scenario]


def test_any_split_on_any_workers_equals_the_unsplit_model(session):
    entries = of(session, "equality")
    assert len(entries) == 6
    for entry in entries:
        assert entry["loss"] <= EXACT, entry
        assert entry["gradient_names"], entry
        assert entry["gradient"] <= EXACT, entry


def test_after_steps_of_two_optimizers_the_gathered_state_is_the_unsplit_models(session):
    for entry in of(session, "equality"):
        assert entry["names"], entry
        assert entry["state"] <= EXACT, entry
        assert entry["evaluation"] <= EXACT, entry
        assert entry["loaded"] == 0, entry


def test_stages_work_on_different_micro_batches_at_once(session):
    (entry,) = of(session, "overlap")
    assert entry["output"] == 24


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("raised", "StageError: on worker2, stage 1, micro-batch 2: ArithmeticError: negative"),
        ("again", "[8, 4]"),
        ("backward", "StageError: on worker2, the backward pass: Python code raised (a hook"),
        ("later", "nothing was raised"),
        ("short", "InvalidInput: inputs are split along their first dimension"),
        ("state", "InvalidInput: the state does not match the model: missing ['0.weight']"),
        ("shape", "StageError: on worker1: RuntimeError: Error(s) in loading state_dict"),
        ("gone", "InvalidInput: this pipeline is closed"),
        (
            "tied",
            "PlanMismatch: on worker1: embedding.weight, head.weight are one weight of several",
        ),
        ("closed", "InvalidInput: this pipeline is closed"),
        ("other", "PlanMismatch: on worker1: the plan was made for another model"),
        ("unsent", "InvalidInput: the model cannot be sent to the workers"),
        ("unknown", "InvalidInput: on worker1: the model cannot be built here"),
        ("uneven", "PlanMismatch: the workers disagree on the model's modules: 1: GELU("),
        ("few", "InvalidInput: the plan has 2 stages, but 1 workers are named"),
        ("split", "InvalidInput: num_split is 3; it must divide the batch of 8"),
        ("nobody", "InvalidInput: this session has no worker 'w2'; its processes are m"),
    ],
)
def test_errors_say_where_and_what_to_do_and_the_session_goes_on(session, what, words):
    (found,) = [entry[what] for entry in of(session, "errors") if what in entry]
    assert str(found).startswith(words)


@pytest.mark.parametrize("scenario", ["death", "late_death"])
def test_a_worker_that_dies_is_named_by_all_others(forking_executable, scenario):
    codes, found, words = run_session(forking_executable, scenario)
    assert codes == [GAVE_UP, GAVE_UP, ENDED], words
    assert [entry["survived"] for entry in found] == [1]
    assert "RankFailed: worker2 (" in words[0]
    assert (
        "the master was at "
        + {"death": "micro-batch 0 of 2", "late_death": "the backward"}[scenario]
        in words[0]
    )
    assert "RankFailed: worker1 stopped serving: RankFailed: worker2 (" in words[1]


def test_workers_end_when_the_controller_is_gone():
    codes, _, words = run_session(sys.executable, "vanishing")  # as a user starts them
    assert codes == [ENDED, GAVE_UP, GAVE_UP], words
    for account in words[1:]:
        assert "RankFailed: worker" in account
        assert "stopped answering" in account
