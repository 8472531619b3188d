"""The table in `docs/concepts/schedules.md` is what the simulator says."""

from pathlib import Path

import pytest

from stagewright.planner.simulator.simulate import StageTimes, simulate
from stagewright.schedules.make_schedule import make_schedule
from stagewright.schedules.traits import NAMES

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "schedules.md"
ROWS = [
    [cell.strip() for cell in line.strip("|\n").split("|")]
    for line in PAGE.read_text().splitlines()
    if line.startswith("| `")
]


def test_every_schedule_is_there():
    assert {row[0].strip("`") for row in ROWS} == set(NAMES)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0].strip('`')}-{row[1]}")
def test_idle_time_and_memory(row):
    name, chunks, num_microbatches = row[0].strip("`"), int(row[1]), 16
    num_stages = 4 * chunks
    backward_s = 0 if name == "forward_only" else 2 / chunks
    times = StageTimes(
        [1 / chunks] * num_stages, [backward_s] * num_stages, saved_bytes=[60] * num_stages
    )
    timeline = simulate(make_schedule(name, num_stages, num_microbatches, chunks=chunks), times)
    busy_s = num_microbatches * (1 + backward_s * chunks)
    held = [peak / 60 / chunks for peak in timeline.peak_activation_bytes]
    assert f"{timeline.step_time_s - busy_s:g}" == row[4]
    assert ", ".join(f"{each:g}" for each in held) == row[5]
