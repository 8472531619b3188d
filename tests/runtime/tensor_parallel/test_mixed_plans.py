"""Plans that mix tensor parallelism, replicas and shards: the unsplit model's numbers."""

import json

import pytest

from tests.runtime.forked import run_as_on_nccl, run_worker
from tests.runtime.tensor_parallel.plans import MIXES

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

FEW = {
    "gpt2": [3, 15], "llama": [], "mixtral": [1], "t5": [], "resnext": [5], "sequential": [0, 1],
}  # fmt: skip
WORKER = "tests.runtime.tensor_parallel.worker"
EXACT = 1e-12


def check(lines, cases):
    """Check that all ranks equal the unsplit model, from the beginning and when resumed."""
    seen = set()
    for line in lines:
        found = json.loads(line)
        seen.add((found["model"], found["mix"], found["begin"]))
        assert max(found["loss"], found["norm"], found["weight"]) <= EXACT, found
        assert found["divided"] or "t" not in found["mix"].split()[0], found
        if found["mix"].startswith("z4"):  # two moments for every element, of a quarter of them
            assert 0.2 < found["state_elements"] / (2 * found["elements"]) < 0.3, found
    assert len(seen) == sum(2 * len(mixes) - 1 for mixes in cases.values() if mixes)


def take_lines(printed):
    return [line for line in printed.splitlines() if line.startswith("{")]


def test_few_mixes_of_each_model(forking_executable, tmp_path):
    cases = {name: [MIXES[at] for at in chosen] for name, chosen in FEW.items()}
    asked = json.dumps({"cases": cases, "folder": str(tmp_path)})
    check(take_lines(run_as_on_nccl(forking_executable, WORKER, asked, timeout_s=600)), cases)


def test_dropout_draws_the_same_masks(forking_executable, tmp_path):
    cases = {"gpt2": [MIXES[0], MIXES[4]]}
    asked = json.dumps({"cases": cases, "folder": str(tmp_path), "dropout": 0.3, "seed": 5})
    check(take_lines(run_worker(forking_executable, WORKER, asked, timeout_s=300)), cases)
