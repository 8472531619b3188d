"""Orders of work in torch's CSV are read, simulated and drawn by themselves."""

import xml.etree.ElementTree as ElementTree

import pytest

from stagewright.core.errors import InvalidInput
from stagewright.core.plan.schedule import TrainingSchedule
from stagewright.formats.runtimes.torch_pipelining import write_communication_csv
from stagewright.formats.svg import schedule_svg
from stagewright.formats.torch_schedule import read_schedule_csv, simulate_schedule
from stagewright.schedules.make_schedule import make_schedule


@pytest.mark.parametrize("name", TrainingSchedule.__args__)
def test_what_is_written_is_read_with_or_without_messages(name):
    chunks = 1 if name in ("gpipe", "1f1b", "zero_bubble") else 2
    schedule = make_schedule(name, 4 * chunks, 8, chunks=chunks)
    compute = "\n".join(",".join(map(str, actions)) for actions in schedule.ranks)
    for text in (compute, write_communication_csv(schedule)):
        found = read_schedule_csv(text)
        assert found.ranks == schedule.ranks
        assert found.stage_ranks == schedule.stage_ranks
        assert found.name == "custom"


def test_gpipe_takes_what_its_formula_says():
    """With F = 1 and B = 2 on S stages and m micro-batches: (m + S - 1) (F + B)."""
    schedule = make_schedule("gpipe", 3, 5)
    text = "\n".join(",".join(map(str, actions)) for actions in schedule.ranks)
    timeline = simulate_schedule(read_schedule_csv(text))
    assert timeline.step_time_s == pytest.approx((5 + 3 - 1) * 3)
    drawing = schedule_svg(read_schedule_csv(text), timeline)
    ElementTree.fromstring(drawing)
    assert "custom: 3 stages on 3 ranks, 5 micro-batches" in drawing
    assert "equal stages, forwards of 1 s and backwards of 2 s" in drawing


def test_idle_cells_and_overlapped_pairs():
    found = read_schedule_csv("0F0,0F1,,0B0,0B1\n,1F0,(1F1;1B0)OVERLAP_F_B,1B1\n")
    assert [str(action) for action in found.ranks[1]] == ["1F0", "1F1", "1B0", "1B1"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected 1 to"),
        ("0F0,0X0", "row 1: '0X0' is no action"),
        ("0F0,0B0\n0F1,0B1", "stage 0 runs on several ranks"),
        ("1F0,1B0", "not numbered from 0"),
        ("0F0,0B0,0F1", "0F1 and no backward"),
        ("0F0,0F0,0B0", "performed twice"),
        ("0F0," + "x" * 200_000, "this is no CSV"),
    ],
)
def test_other_text_is_refused(text, said):
    with pytest.raises(InvalidInput, match=said):
        read_schedule_csv(text)


def test_an_order_that_waits_for_itself_is_refused():
    with pytest.raises(InvalidInput):
        read_schedule_csv("0B0,0F0\n1F0,1B0")
    with pytest.raises(InvalidInput, match="deadlocks"):
        read_schedule_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0")
