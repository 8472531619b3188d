"""Orders of work in torch's CSV: a row a rank, an action a cell, an empty cell for idle time."""

from __future__ import annotations

import csv
import re
from collections import defaultdict

from pydantic import ValidationError

from ..core.errors import InvalidInput
from ..core.plan.schedule import Schedule
from ..core.plan.timeline import Timeline
from ..planner.simulator.simulate import StageTimes, simulate
from ..schedules.validate import validate

MAX_ACTIONS = 1_000_000

_ACTION = re.compile(r"(\d{1,6})([FBIW])(\d{1,7})")
_COMMUNICATION = re.compile(r"\d+(?:UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def read_schedule_csv(text: str) -> Schedule:
    """Read an order of work, with or without sends and receives, which are implied here.

    Raises:
        InvalidInput: A cell is no action, a stage runs on two ranks, an action is missing, or the
            order waits for itself.
    """
    ranks: list[list[str]] = []
    for number, row in enumerate(_read_rows(text), start=1):
        actions: list[str] = []
        for cell in row:
            # Two actions that torch overlaps are performed one after the other here.
            pair = _OVERLAPPED.fullmatch(cell.strip())
            parts = pair[1].split(";") if pair else [cell.strip()]
            for part in parts:
                if _ACTION.fullmatch(part):
                    actions.append(part)
                elif part and not _COMMUNICATION.fullmatch(part):
                    raise InvalidInput(
                        f"row {number}: {part[:40]!r} is no action such as 0F0 or 1B3"
                    )
        ranks.append(actions)
    if not any(ranks) or sum(map(len, ranks)) > MAX_ACTIONS:
        raise InvalidInput(f"expected 1 to {MAX_ACTIONS} actions, a row for each rank")
    holders: dict[int, set[int]] = defaultdict(set)
    last = 0
    for rank, actions in enumerate(ranks):
        for action in actions:
            match = _ACTION.fullmatch(action)
            assert match is not None
            holders[int(match[1])].add(rank)
            last = max(last, int(match[3]))
    shared = [stage for stage, held in holders.items() if len(held) > 1]
    if shared or sorted(holders) != list(range(len(holders))):
        raise InvalidInput(
            f"stage {shared[0]} runs on several ranks"
            if shared
            else f"stages {sorted(holders)} are not numbered from 0 without gaps"
        )
    try:
        schedule = Schedule.model_validate(
            {
                "name": "custom",
                "num_microbatches": last + 1,
                "stage_ranks": [[min(holders[stage])] for stage in range(len(holders))],
                "ranks": ranks,
            }
        )
    except ValidationError as error:
        raise InvalidInput(str(error.errors()[0]["msg"]).removeprefix("Value error, ")) from None
    validate(schedule)
    return schedule


def _read_rows(text: str) -> list[list[str]]:
    try:
        return list(csv.reader(text.rstrip().splitlines()))
    except csv.Error as error:
        raise InvalidInput(f"this is no CSV: {error}") from None


def simulate_schedule(schedule: Schedule) -> Timeline:
    """Simulate an order of work by itself: equal stages, forwards of 1 s, backwards of 2 s."""
    stages = schedule.num_stages
    return simulate(schedule, StageTimes(forward_s=[1.0] * stages, backward_s=[2.0] * stages))
