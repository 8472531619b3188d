"""Jobs as rows: the truth about what is to be done, is being done, and came of it.

::

    queued --start--> running --finish--> succeeded | failed | cancelled
       |  <--requeue--  |
       +----------------+--request_cancel: queued ends at once, running is told to end
"""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import Field

from ...core.document import Record
from .records import Stored

JobState = Literal["queued", "running", "succeeded", "failed", "cancelled"]
FinalState = Literal["succeeded", "failed", "cancelled"]
UNFINISHED: tuple[JobState, ...] = ("queued", "running")

MAX_PROGRESS_EVENTS = 10_000
"""Of one job; what it reports beyond that is not kept. Changes of its state always are."""


class JobFacts(Record):
    """What is to be done, but for the request itself, which may be large.

    Attributes:
        kind: Which code does it, e.g. ``plan`` or ``profile``.
        request_digest: Equal for requests with equal answers; finds one already on its way.
        submit_key: Two submissions of one project with the same key are one job. One that failed
            or was cancelled gives its key up.
        key_id: The API key that asked, for its quota.
        needs: The kind of device it has to run on, if any.
        deadline_at: When it has to have ended.
    """

    kind: str
    request_digest: str | None = None
    submit_key: str | None = Field(None, max_length=500)
    key_id: str | None = None
    needs: str | None = None
    deadline_at: datetime | None = None


class JobRequest(JobFacts):
    """What is to be done.

    Attributes:
        request_json: What the code that does it reads; the store does not.
    """

    request_json: str


class Job(JobFacts, Stored):
    """A job as it stands; `job_contract.Jobs.request_json` has its request.

    Attributes:
        attempt: How often it was started; 0 before the first time.
        worker: Who runs the present attempt.
        heartbeat_at: The last sign of that worker.
        cancel_requested: Whoever runs it is to end it.
        result_id: Id of the plan or profile it made.
        outcome_json: What else came of it: of a failure, the problem.
    """

    project_id: str
    state: JobState
    attempt: int
    worker: str | None = None
    started_at: datetime | None = None
    heartbeat_at: datetime | None = None
    finished_at: datetime | None = None
    cancel_requested: bool = False
    result_id: str | None = None
    outcome_json: str | None = None

    @property
    def is_finished(self) -> bool:
        return self.state not in UNFINISHED


class JobEvent(Record):
    """Something that happened to a job.

    Attributes:
        number: 1, 2, 3 and so on without gaps; resume after the last one seen.
        kind: ``queued``, ``started``, ``requeued``, ``cancel-requested``, a final state, or what
            its worker reports, e.g. ``progress``.
        data_json: More, as JSON.
    """

    number: int
    created_at: datetime
    attempt: int
    kind: str
    data_json: str = "{}"
