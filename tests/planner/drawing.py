"""Timelines as tables: one row a rank, one column a unit of time."""

from stagewright.core.schedule import Work
from stagewright.core.timeline import Timeline


def drawn(timeline: Timeline) -> list[str]:
    """For example ``F0 F1 .. B0``; durations must be whole numbers."""
    columns = round(timeline.step_time_s)
    rows = [[".."] * columns for _ in range(timeline.num_ranks)]
    for event in timeline.events:
        if isinstance(event.kind, Work):
            for column in range(round(event.start_s), round(event.end_s)):
                assert rows[event.rank][column] == "..", "a rank does two things at once"
                rows[event.rank][column] = f"{event.kind.value}{event.microbatch}"
    return [" ".join(row) for row in rows]
