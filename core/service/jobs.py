"""A job as the service shows it: measurements, and plans that need one."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from ..document import Record
from .problems import ProblemDocument

JobState = Literal["queued", "running", "succeeded", "failed", "cancelled"]
FINAL_STATES = frozenset({"succeeded", "failed", "cancelled"})


class JobResult(Record):
    """What a job made, and where it is."""

    kind: Literal["plan", "profile", "graph"]
    id: str
    href: str


class JobView(Record):
    """A job as it stands.

    Attributes:
        kind: What it does.
        attempt: How often it was started.
        deadline_at: When it has to have ended.
        needs: Devices it has to run on: how many of each kind.
        message: What keeps it from running, and what would help.
        progress: What it last reported: ``step``, and ``done`` of ``total`` where it counts.
        result: What it made, if it succeeded.
        problem: Why it did not.
    """

    id: str
    kind: Literal["profile", "plan"]
    state: JobState
    attempt: int
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    deadline_at: datetime | None = None
    needs: dict[str, float] = Field(default_factory=dict)
    message: str | None = None
    progress: dict[str, Any] | None = None
    result: JobResult | None = None
    problem: ProblemDocument | None = None

    @property
    def is_finished(self) -> bool:
        return self.state in FINAL_STATES


class JobList(Record):
    """Jobs, newest first; ``next_cursor`` asks for those before them, `None` if there are none."""

    jobs: tuple[JobView, ...]
    next_cursor: str | None = None


class JobEvent(Record):
    """Something that happened to a job.

    Attributes:
        number: 1, 2, 3 and so on without gaps; resume after the last one seen.
        kind: ``queued``, ``started``, ``progress``, ``requeued`` or a final state.
        data: More of it.
    """

    number: int
    kind: str
    data: dict[str, Any] = Field(default_factory=dict)

    @property
    def is_final(self) -> bool:
        return self.kind in FINAL_STATES
