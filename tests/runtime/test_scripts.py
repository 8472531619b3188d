"""One script under twelve plans: the unsplit model's numbers, or a refusal that names the line."""

import json

import pytest

from tests.runtime.forked import run_worker

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]

EXACT = 1e-12


@pytest.fixture(scope="module")
def lines(forking_executable):
    """What every rank found under every plan."""
    printed = run_worker(forking_executable, "tests.runtime.scripts_worker", timeout_s=280)
    found = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert len({line["plan"] for line in found}) == 12
    return found


def test_losses_weights_and_averages_are_the_unsplit_models(lines):
    for line in lines:
        assert line["worst"] <= EXACT, line


def test_an_optimizer_of_weights_that_were_sharded_is_refused(lines):
    for line in lines:
        assert ("optimizer" in line["refused"]) == ("f2" in line["plan"]), line
        if "f2" in line["plan"]:
            assert "before the pipeline was built" in line["refused"]["optimizer"]


def test_weights_of_other_ranks_cannot_be_read_by_mistake(lines):
    for line in lines:
        assert not line["stale"], line
        is_whole = line["plan"].split()[0] in ("one", "r2", "z2")
        assert ("teacher" not in line["refused"]) == is_whole, line


def test_a_mode_that_the_model_alone_was_switched_to_is_refused(lines):
    for line in lines:
        assert "call train() or eval() of the pipeline" in line["refused"]["mode"], line
