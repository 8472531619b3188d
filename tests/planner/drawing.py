"""Timelines as tables: one row a rank, one column a unit of time."""

from stagewright.core.plan.schedule import Work
from stagewright.core.plan.timeline import Timeline


def drawn(timeline: Timeline, *, stages: bool = False) -> list[str]:
    """For example ``F0 F1 .. B0``, with stages ``0F0 0F1 ... 1B0``; durations must be whole."""
    columns = round(timeline.step_time_s)
    rows = [["..." if stages else ".."] * columns for _ in range(timeline.num_ranks)]
    for event in timeline.events:
        if isinstance(event.kind, Work):
            for column in range(round(event.start_s), round(event.end_s)):
                assert rows[event.rank][column] in ("..", "..."), "a rank does two things at once"
                name = f"{event.kind.value}{event.microbatch}"
                rows[event.rank][column] = f"{event.stage}{name}" if stages else name
    return [" ".join(row) for row in rows]
