"""Where one rank cannot go along, all of them hear why, and nothing is saved by halves."""

import json

import pytest

from tests.runtime.forked import run_worker

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

SAID = {
    "other step": "rank 0 saves step 1, rank 1 step 2",
    "no json": "rank 1: cannot save extra['f'], a builtin_function_or_method",
    "other shape": "common.weight is float32 [4, 4] on one rank and float32 [5, 4] on rank 1",
    "other rate": "ranks that hold common.weight keep different state for it: ",
    "other optimizer": "ranks use different optimizers: Adam, SGD; use one",
    "other folder": "is not the folder that rank 0 writes to; use a folder that all",
    "full disk": "rank 1: OSError: [Errno 28] No space left on device",
    "another saves": "another process is saving into ",
    "load more": "not in the checkpoint: more.weight, more.bias",
    "load less": "not in the model: of 0.weight, of 0.bias, of 1.weight, of 1.bias",
    "load optimizer": "rank 1: the checkpoint is of SGD, the optimizer is Adam",
}


@pytest.fixture(scope="module")
def told(forking_executable, tmp_path_factory):
    """Each rank's account by case."""
    folder = tmp_path_factory.mktemp("ranks") / "run"
    output = run_worker(
        forking_executable, "tests.runtime.checkpoint.disagree_worker", str(folder), timeout_s=200
    )
    entries = [json.loads(line) for line in output.splitlines()]
    return {
        case: sorted((e for e in entries if e["case"] == case), key=lambda e: e["rank"])
        for case in {entry["case"]: None for entry in entries}
    }


def test_every_case_was_tried_on_both(told):
    assert set(told) == {"well", *SAID, "bug", "load well", "random", "sharded"}
    assert all([entry["rank"] for entry in entries] == [0, 1] for entries in told.values())


def test_together_it_works(told):
    assert [entry.get("done") for entry in told["well"]] == ["step-000001"] * 2
    assert [entry.get("done") for entry in told["load well"]] == [1, 1]
    drawn = [entry.get("done") for entry in told["random"]]
    assert None not in drawn
    assert drawn[0] != drawn[1]


def test_shards_go_on_as_other_shards_and_whole(told):
    for entry in told["sharded"]:
        without_stop, *resumed = entry["done"]
        assert resumed == pytest.approx([without_stop] * 2, rel=1e-12)


@pytest.mark.parametrize("case", SAID)
def test_both_are_told(told, case):
    for entry in told[case]:
        assert entry["error"] == "InvalidInput", entry
        assert SAID[case] in entry["said"]
    steps = [name for name in told[case][0]["left"] if name.startswith((".saving", "step"))]
    assert steps == ["step-000001"]


def test_a_bug_is_raised_where_it_is_and_named_elsewhere(told):
    first, second = told["bug"]
    assert second["error"] == "ZeroDivisionError"
    assert first["error"] == "RankFailed"
    assert first["said"] == "rank 1: ZeroDivisionError: division by zero"
