"""Two processes that both send first: gloo lets them pass, NCCL would not."""

import pytest

from tests.runtime.forked import run_as_on_nccl

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]


@pytest.mark.parametrize("is_bound", [False, True], ids=["lazy", "bound"])
def test_sending_first_on_both_ranks_is_printed_as_a_circle(forking_executable, is_bound):
    with pytest.raises(AssertionError, match="ranks wait for each other in a circle") as caught:
        run_as_on_nccl(
            forking_executable,
            "tests.nccl.send_first_worker",
            "sends",
            timeout_s=60,
            is_bound=is_bound,
        )
    told = str(caught.value)
    assert "rank 0:" in told
    assert "waits for rank 1" in told
    assert "rank 1:" in told
    assert "waits for rank 0" in told


def test_taking_turns_is_none(forking_executable):
    run_as_on_nccl(forking_executable, "tests.nccl.send_first_worker", "turns", timeout_s=60)
