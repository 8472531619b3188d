"""Schedules in the order torch performs them."""

import pytest

from stagewright.core.errors import InvalidInput
from stagewright.core.schedule import Work
from stagewright.planner.schedules import in_flight, make_schedule


def orders(name, num_stages, num_microbatches):
    schedule = make_schedule(name, num_stages, num_microbatches)
    return [
        " ".join(f"{action.work.value}{action.microbatch}" for action in actions)
        for actions in schedule.ranks
    ]


def test_gpipe_fills_then_drains_in_the_same_order():
    assert orders("gpipe", 2, 3) == ["F0 F1 F2 B0 B1 B2"] * 2


def test_1f1b_warms_up_by_the_stages_still_to_come():
    assert orders("1f1b", 3, 4) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_1f1b_with_fewer_microbatches_than_stages():
    assert orders("1f1b", 3, 1) == ["F0 B0"] * 3
    assert orders("1f1b", 3, 2) == ["F0 F1 B0 B1", "F0 F1 B0 B1", "F0 B0 F1 B1"]


def test_forward_only():
    assert orders("forward_only", 2, 2) == ["F0 F1"] * 2


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_in_flight_is_the_most_a_rank_holds(name):
    for num_stages in range(1, 6):
        for num_microbatches in range(1, 8):
            schedule = make_schedule(name, num_stages, num_microbatches)
            for stage, actions in enumerate(schedule.ranks):
                held = most = 0
                for action in actions:
                    held += 1 if action.work is Work.FORWARD else -1
                    most = max(most, held)
                assert held == 0
                assert most == in_flight(name, stage, num_stages, num_microbatches)


def test_in_flight_without_backward_is_one():
    assert in_flight("forward_only", 0, 4, 8) == 1


def test_what_is_not_a_schedule_is_refused():
    with pytest.raises(InvalidInput, match="no schedule is called 'zero'"):
        make_schedule("zero", 2, 2)
    with pytest.raises(InvalidInput, match="at least one stage"):
        make_schedule("1f1b", 0, 2)
    with pytest.raises(InvalidInput, match="stage 2 is not one of 2"):
        in_flight("1f1b", 2, 2, 2)


class RecordingStage:
    """Stands for a stage of torch's schedules and writes down what it is told to do."""

    def __init__(self, stage_index):
        self.stage_index = stage_index
        self.done = []

    def forward_one_chunk(self, index, *_, **__):
        self.done.append(f"F{index}")

    def backward_one_chunk(self, index, **_):
        self.done.append(f"B{index}")

    def __getattr__(self, name):
        if name.startswith("get_"):
            return lambda index: []
        return lambda *_: None


@pytest.mark.parametrize(
    ("name", "torch_name"), [("1f1b", "Schedule1F1B"), ("gpipe", "ScheduleGPipe")]
)
def test_the_order_is_the_one_torch_performs(name, torch_name):
    """Its `_get_pipeline_order` is for show and counts 1F1B's last stage from 1; this is run."""
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for num_stages, num_microbatches in ((1, 3), (2, 2), (3, 5), (4, 9)):
        performed = []
        for stage_index in range(num_stages):
            stage = RecordingStage(stage_index)
            schedule = object.__new__(getattr(torch_schedules, torch_name))
            schedule._stage, schedule._num_stages = stage, num_stages
            schedule._n_microbatches, schedule.scale_grads = num_microbatches, False
            batches = [()] * num_microbatches
            schedule._check_inputs = lambda *_, batches=batches: (batches, [{}] * len(batches))
            for ignored in (
                "_initialize_stage",
                "_maybe_compute_loss",
                "_maybe_get_loss",
                "_update_losses",
            ):
                setattr(schedule, ignored, lambda *_: None)
            schedule._step_microbatches()
            performed.append(" ".join(stage.done))
        assert orders(name, num_stages, num_microbatches) == performed
