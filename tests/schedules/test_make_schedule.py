"""Schedules in the order torch performs them."""

from collections import Counter
from itertools import combinations, product

import pytest

from stagewright.core.errors import InvalidInput
from stagewright.planner.simulator.simulate import StageTimes, simulate
from stagewright.schedules.action_order import default_depths
from stagewright.schedules.make_schedule import in_flight, make_schedule


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


def actions(schedule):
    return [" ".join(map(str, row)) for row in schedule.ranks]


def test_microbatches_are_dealt_to_replicas_in_turn():
    """Depths: ceil(5 / 2) = 3, capped by the 3 and 2 micro-batches; 3; 1."""
    schedule = make_schedule("1f1b", 3, 5, replicas=(2, 1, 2))
    assert schedule.stage_ranks == ((0, 1), (2,), (3, 4))
    assert actions(schedule) == [
        "0F0 0F2 0F4 0B0 0B2 0B4",
        "0F1 0F3 0B1 0B3",
        "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1B3 1B4",
        "2F0 2B0 2F2 2B2 2F4 2B4",
        "2F1 2B1 2F3 2B3",
    ]


def test_more_replicas_than_microbatches_leave_some_idle():
    assert actions(make_schedule("gpipe", 2, 2, replicas=(1, 3))) == [
        "0F0 0F1 0B0 0B1",
        "1F0 1B0",
        "1F1 1B1",
        "",
    ]


def test_replicas_of_a_chunked_schedule_are_copies_of_the_pipeline():
    schedule = make_schedule("interleaved_1f1b", 4, 4, replicas=(2,) * 4, chunks=2)
    assert schedule.stage_ranks == ((0, 1), (2, 3), (0, 1), (2, 3))
    assert actions(schedule)[1] == "0F1 0F3 2F1 2F3 2B1 2B3 0B1 0B3"


def test_zero_bubble_puts_weight_parts_off_by_the_rank():
    assert orders("zero_bubble", 3, 3) == [
        "F0 F1 F2 I0 W0 I1 W1 I2 W2",
        "F0 F1 I0 F2 I1 W0 I2 W1 W2",
        "F0 I0 F1 I1 F2 I2 W0 W1 W2",
    ]


def test_a_v_comes_back_to_the_ranks_it_went_through():
    schedule = make_schedule("zbv", 6, 2, chunks=2)
    assert schedule.stage_ranks == ((0,), (1,), (2,), (2,), (1,), (0,))


def test_depths_replace_the_warm_up():
    schedule = make_schedule("1f1b", 2, 4, depths=(3, 2))
    assert actions(schedule) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
    ]
    assert make_schedule("1f1b", 2, 4, depths=(9, 1)) == make_schedule("1f1b", 2, 4, depths=(4, 1))


def test_default_depths_by_hand():
    """By D_s = r_s (1 + ceil(D_{s+1} / r_s)), d_s = D_s / r_s: 1-2-1 replicas have D 1, 4, 5."""
    assert default_depths(8, (1, 1, 1)) == (3, 2, 1)
    assert default_depths(2, (1, 1, 1)) == (2, 2, 1)
    assert default_depths(8, (2, 1)) == (2, 1)
    assert default_depths(8, (1, 2, 1)) == (5, 2, 1)
    assert default_depths(64, (1, 15)) == (16, 1)


@pytest.mark.parametrize("replicas", [(1, 1), (2, 1), (1, 2), (2, 3), (3, 2), (1, 2, 1), (2, 3, 1)])
def test_depths_that_could_wait_for_ever_are_refused_and_no_others(replicas):
    """It does not do to compare neighbours: with 1-2-1 replicas depths 1, 1, 2 wait for ever."""
    times = StageTimes([1] * len(replicas), [1] * len(replicas))
    for depths in product(range(1, 5), repeat=len(replicas)):
        fits = all(
            (after - 1) * behind < before * front
            for (before, front), (after, behind) in combinations(
                zip(depths, replicas, strict=True), 2
            )
        )
        if fits:
            made = make_schedule("1f1b", len(replicas), 12, replicas=replicas, depths=depths)
            simulate(made, times, with_events=False)
        else:
            with pytest.raises(InvalidInput, match="would deadlock"):
                make_schedule("1f1b", len(replicas), 12, replicas=replicas, depths=depths)


def test_depths_that_do_not_fit_are_refused():
    with pytest.raises(InvalidInput, match="1 depths for 2 stages"):
        make_schedule("1f1b", 2, 4, depths=(3,))
    with pytest.raises(InvalidInput, match="at least one forward ahead, not 0"):
        make_schedule("1f1b", 2, 4, depths=(3, 0))
    with pytest.raises(InvalidInput, match="give stage 0 a depth of at least 3, or stage 1 a sma"):
        make_schedule("1f1b", 2, 4, depths=(2, 3))
    with pytest.raises(InvalidInput, match="only the 1f1b schedule takes depths; gpipe has"):
        make_schedule("gpipe", 2, 4, depths=(2, 1))


@pytest.mark.parametrize(
    ("name", "chunks", "replicas"),
    [
        ("gpipe", 1, (1, 1, 1)),
        ("gpipe", 1, (2, 1, 3)),
        ("1f1b", 1, (1, 1, 1)),
        ("1f1b", 1, (2, 1, 3)),
        ("1f1b", 1, (1, 1, 2)),
        ("zero_bubble", 1, (1, 1, 1)),
        ("zero_bubble", 1, (2, 2, 2)),
        ("interleaved_1f1b", 2, (1,) * 4),
        ("interleaved_zero_bubble", 3, (1,) * 6),
        ("looped_bfs", 2, (1,) * 4),
        ("zbv", 2, (1,) * 6),
        ("dualpipev", 2, (1,) * 6),
        ("dualpipev", 2, (2,) * 4),
    ],
)
def test_in_flight_is_the_most_a_rank_holds(name, chunks, replicas):
    num_stages = len(replicas)
    for num_microbatches in range(2, 14, 2):
        schedule = make_schedule(
            name, num_stages, num_microbatches, replicas=replicas, chunks=chunks
        )
        held, most = Counter(), Counter()
        for rank, actions in enumerate(schedule.ranks):
            for action in actions:
                place = (action.stage, rank)
                held[place] += {"F": 1, "B": -1, "I": 0, "W": -1}[action.work]
                most[action.stage] = max(most[action.stage], held[place])
        assert set(held.values()) == {0}
        for stage in range(num_stages):
            assert most[stage] == in_flight(
                name, stage, num_stages, num_microbatches, replicas=replicas, chunks=chunks
            )


def test_zero_bubble_holds_as_many_everywhere_as_1f1b_in_front():
    for num_microbatches in range(1, 9):
        for stage in range(4):
            held = in_flight("zero_bubble", stage, 4, num_microbatches)
            assert held == in_flight("1f1b", 0, 4, num_microbatches) == min(4, num_microbatches)


def test_in_flight_without_backward_is_one():
    assert in_flight("forward_only", 0, 4, 8) == 1


def test_what_is_not_a_schedule_is_refused():
    with pytest.raises(InvalidInput, match="unknown schedule 'zero'"):
        make_schedule("zero", 2, 2)
    with pytest.raises(InvalidInput, match="at least one stage"):
        make_schedule("1f1b", 0, 2)
    with pytest.raises(InvalidInput, match="stage 2 is not one of 2"):
        in_flight("1f1b", 2, 2, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1b", 2, 4, (1,)), "1 numbers of replicas for 2 stages"),
        (("1f1b", 2, 4, (1, 0)), "at least one replica, not 0"),
        (
            ("zbv", 4, 4, (2, 1, 1, 2), 2),
            "the zbv schedule needs the same number .* 2-1-1-2",
        ),
        (("1f1b", 4, 4, (), 2), "the 1f1b schedule puts one stage on a rank, not 2"),
        (("zbv", 4, 4), "the zbv schedule puts two stages on a rank; chunks is 1"),
        (("interleaved_1f1b", 4, 4, (), 0), "at least one stage, not 0"),
        (("interleaved_1f1b", 5, 4, (), 2), "5 stages cannot be placed 2 to a rank"),
        (("interleaved_1f1b", 4, 5, (), 2), "5 cannot be divided into 2 rounds over 2 ranks"),
        (("interleaved_zero_bubble", 4, 9, (2,) * 4, 2), "5 cannot be divided into 2 rounds"),
    ],
)
def test_numbers_a_schedule_does_not_take_are_refused(arguments, message):
    name, num_stages, num_microbatches, *more = arguments
    replicas, chunks = (*more, (), 1)[:2] if len(more) < 2 else more
    with pytest.raises(InvalidInput, match=message):
        make_schedule(name, num_stages, num_microbatches, replicas=replicas, chunks=chunks)


TORCH_NAMES = {
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_the_order_is_the_one_torch_plans(name):
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    compared = 0
    for positions, chunks, rounds in product((1, 2, 3, 4), (1, 2, 3), (1, 2, 3, 5, 9)):
        for num_microbatches in {rounds * positions, rounds}:
            if chunks != {"zero_bubble": 1, "zbv": 2, "dualpipev": 2}.get(name, chunks):
                continue
            if name == "dualpipev" and num_microbatches < positions * chunks:
                continue  # torch takes no fewer
            stages = positions * chunks
            try:
                ours = make_schedule(name, stages, num_microbatches, chunks=chunks)
            except InvalidInput:
                continue
            theirs = object.__new__(getattr(torch_schedules, TORCH_NAMES[name]))
            theirs._stages, theirs._n_microbatches = [None] * chunks, num_microbatches
            theirs.pp_group_size, theirs.n_local_stages = positions, chunks
            theirs.num_stages = theirs._num_stages = stages
            theirs.microbatches_per_round = num_microbatches // max(
                1, num_microbatches // positions
            )
            for rank in range(positions):
                planned = theirs._calculate_single_rank_operations(rank)
                expected = [
                    str(part)
                    for action in planned
                    if action is not None
                    for part in action.sub_actions or (action,)
                ]
                assert list(map(str, ours.ranks[rank])) == expected
                compared += 1
    assert compared > 20


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
