"""Jobs of the service: measurements, and plans that need one."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from ..document import Record
from .problems import ProblemDocument

JobState = Literal["queued", "running", "succeeded", "failed", "cancelled"]
FINAL_STATES = frozenset({"succeeded", "failed", "cancelled"})


class JobResult(Record):
    """The document that a job produced, and its location."""

    kind: Literal["plan", "profile", "graph"]
    id: str
    href: str


class JobView(Record):
    """The current state of a job.

    Attributes:
        attempt: Number of times it was started.
        deadline_at: Time by which it must finish.
        needs: Number of devices of each kind that it needs.
        message: Why it cannot run yet, and what would help.
        progress: Last reported progress: ``step``, and ``done`` of ``total`` if countable.
        result: The document it produced, if it succeeded.
        problem: Why it failed.
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
    """Jobs, newest first; ``next_cursor`` requests the next page, `None` on the last one."""

    jobs: tuple[JobView, ...]
    next_cursor: str | None = None


class JobEvent(Record):
    """An event of a job.

    Attributes:
        number: Consecutive from 1, without gaps; resume after the last one seen.
        kind: ``queued``, ``started``, ``progress``, ``requeued`` or a final state.
        data: Details, depending on the kind.
    """

    number: int
    kind: str
    data: dict[str, Any] = Field(default_factory=dict)

    @property
    def is_final(self) -> bool:
        return self.kind in FINAL_STATES
