"""A rank's own error keeps its kind, and its exit code, on the way through the launcher."""

import sys

import pytest
import torch

from stagewright.cli.exit_codes import ExitCode, exit_code
from stagewright.cli.support import launch_ranks as launch
from stagewright.cli.support import train_worker
from stagewright.core.errors import CaptureError, PlanMismatch, RankFailed
from tests.torch_models import make_case, make_plan


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PlanMismatch("another model"), ExitCode.USAGE),
        (CaptureError("cannot be captured"), ExitCode.USAGE),
        (torch.OutOfMemoryError("CUDA out of memory"), ExitCode.INFEASIBLE),
        (MemoryError(), ExitCode.INFEASIBLE),
        (KeyError("layer"), ExitCode.BUG),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_first_cause_is_raised_and_not_what_it_led_to(tmp_path, error, code):
    launch.write_error(tmp_path, 0, RankFailed("rank 1 stopped answering"))
    launch.write_error(tmp_path, 1, error)
    raised = launch._build_error(tmp_path, 1, "torchrun's table")
    assert exit_code(raised) is code
    assert "rank 1" in str(raised)
    assert str(error) in str(raised)


def test_ranks_that_lost_another_tell_together(tmp_path):
    for rank in (0, 2):
        launch.write_error(tmp_path, rank, RankFailed(f"rank 1 is gone; rank {rank} waited"))
    raised = launch._build_error(tmp_path, 1, "")
    assert isinstance(raised, RankFailed)
    assert "rank 0: rank 1 is gone" in str(raised)
    assert "rank 2: rank 1 is gone" in str(raised)


def test_an_error_that_is_none_of_ours_is_written_down_too(tmp_path, monkeypatch):
    """The user saw the launcher's table of exit codes instead."""

    def broken(*_):
        raise KeyError("layer")

    class Ended(BaseException):
        pass

    def end(code):
        raise Ended

    path = tmp_path / "plan.json"
    make_plan(make_case("mlp"), 1).write(path)
    monkeypatch.setattr(train_worker, "train_whole", broken)
    monkeypatch.setattr(train_worker, "end_process", end)
    monkeypatch.setattr(train_worker, "end_with_owner", lambda folder: None)
    monkeypatch.setattr(train_worker, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(sys, "argv", ["worker", str(path), str(tmp_path), "--steps=1", "--whole"])
    with pytest.raises(Ended):
        train_worker.main()
    raised = launch._build_error(tmp_path, 1, "")
    assert str(raised) == "rank 0: KeyError: 'layer'"
    assert "in broken" in raised.__notes__[0]
