"""Ranks that were given different things say which rank differs in what, and all of them stop."""

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from stagewright.core.errors import PlanMismatch
from stagewright.runtime.ranks.consistency import check_consistency, compare_facts, name_ranks
from tests.runtime.forked import run_worker


class Board:
    """What ranks publish, in one process."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()


class Publisher:
    """The part of a `FailureDetector` that is used."""

    def __init__(self, board, rank, num_ranks):
        self.board, self.rank, self.num_ranks = board, rank, num_ranks

    def set_activity(self, activity):
        pass

    def publish(self, name, value):
        with self.board.changed:
            self.board.values[name, self.rank] = value
            self.board.changed.notify_all()

    def wait_for(self, name, rank):
        with self.board.changed:
            assert self.board.changed.wait_for(lambda: (name, rank) in self.board.values, 20)
            return self.board.values[name, rank]


def compare(*given, ids=None):
    """What each rank raised, given its facts."""
    board = Board()

    def on_rank(rank):
        plan_id = ids[rank] if ids else "plan_1"
        try:
            check_consistency(Publisher(board, rank, len(given)), given[rank], plan_id)
        except PlanMismatch as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(given)) as pool:
        return list(pool.map(on_rank, range(len(given))))


def test_equal_facts_pass_whatever_the_plans_are_called():
    facts = {"micro-batches": ["8"], "modules": ["a", "b"]}
    assert compare(facts, facts, facts, ids=["plan_1", "plan_2", "plan_1"]) == [""] * 3


def test_every_rank_names_the_one_that_differs_and_both_values():
    usual, other = {"micro-batches": ["8"]}, {"micro-batches": ["4"]}
    said = compare(usual, usual, other, usual, ids=["p1", "p1", "p2", "p1"])
    assert set(said) == {said[0]}
    assert said[0].startswith(
        "the ranks disagree on micro-batches: 4 on rank 2 (p2), but 8 on ranks 0, 1 and 3 (p1)."
    )


def test_the_first_line_that_differs_is_shown():
    said = compare({"modules": ["a", "b", "c"]}, {"modules": ["a", "x", "c"]}, {"modules": ["a"]})
    assert "b on rank 0" in said[0] or "x on rank 1" in said[0]
    said = compare({"modules": ["a", "b"]}, {"modules": ["a", "b"]}, {"modules": ["a"]})
    assert "nothing more on rank 2, but b on ranks 0 and 1" in said[0]


def test_of_two_ranks_the_first_is_taken_to_be_right():
    assert "4 on rank 1, but 8 on rank 0" in compare({"n": ["8"]}, {"n": ["4"]})[0]


def test_workers_are_compared_by_name():
    compare_facts({"w1": {"n": ["8"]}, "w2": {"n": ["8"]}})
    with pytest.raises(PlanMismatch, match="the workers disagree on n: 4 on w2, but 8 on w1"):
        compare_facts({"w1": {"n": ["8"]}, "w2": {"n": ["4"]}})


def test_many_ranks_are_counted():
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([0, 1, 3]) == "ranks 0, 1 and 3"
    assert name_ranks(range(9)) == "ranks 0, 1, 2, 3, 4, 5 and 3 more"


DIFFERENCES = {
    "samples": "different inputs for step 1: those of rank 1 are not those of ranks 0 and 2",
    "targets": "different targets for step 1: those of rank 1 are not those of ranks 0 and 2",
    "half a batch": r"'x' has shape \(4, 4\); this plan's batch is \(8, 4\)",
    "shapes": (
        r"disagree on the model's parameters and buffers: scale\.scale torch.float32 \(1,\) "
        r"trainable on rank 1, but scale\.scale torch.float32 \(4,\) trainable on ranks 0 and 2"
    ),
    "code": r"disagree on the captured graph: .*neg.* on rank 1, but .* on ranks 0 and 2",
    "micro-batches": (
        r"disagree on the number of micro-batches per step: 2 on rank 1 \(plan_\w+\), but 4 on "
        r"ranks 0 and 2 \(plan_"
    ),
}


@pytest.fixture(scope="module")
def said(forking_executable):
    """What real ranks said, by the difference that rank 1 was given."""
    output = run_worker(
        forking_executable, "tests.runtime.disagreeing_worker", *DIFFERENCES, timeout_s=160
    )
    found = {name: {} for name in DIFFERENCES}
    for line in map(json.loads, output.splitlines()):
        found[line["difference"]][line["rank"]] = line["said"]
    return found


@pytest.mark.distributed
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", DIFFERENCES)
def test_no_rank_trains_on_with_something_else_than_the_others(name, said):
    assert set(said[name]) == {0, 1, 2}
    for rank, words in said[name].items():
        assert re.search(DIFFERENCES[name], words), (rank, words)
        own_error = rank == 1 and name == "half a batch"
        assert own_error or "rank 1" in words
