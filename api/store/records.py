"""What a store keeps besides documents: projects, keys, answers and the audit log."""

from __future__ import annotations

from datetime import datetime
from typing import Generic, Literal, TypeVar

from pydantic import Field, JsonValue

from ...core.document import Record
from ...core.service.keys import ApiKey as ApiKey
from ...core.service.keys import NewApiKey as NewApiKey
from ...core.service.keys import Quotas as Quotas
from ...core.service.stored import Stored as Stored

DEFAULT_PROJECT = "project_default"
"""The project of everything made without a key of another one. It always exists."""

Item = TypeVar("Item")


class Page(Record, Generic[Item]):
    """Part of a list.

    Attributes:
        items: The rows of this page.
        next_cursor: Asks for the page after this one; `None` on the last.
    """

    items: tuple[Item, ...]
    next_cursor: str | None = None


class Project(Stored):
    """Owner of keys and documents; what one project stores no other sees."""

    name: str


class Answer(Record):
    """A response to be given again for the same idempotency key.

    Attributes:
        status: HTTP status code.
        headers: Name and value, in order.
        body: Its text.
    """

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: str = ""


class AuditEvent(Record):
    """Something someone did.

    Attributes:
        action: What, e.g. ``plan.create``.
        outcome: How it ended, e.g. ``ok`` or the kind of problem.
        project_id: Where; `None` for the server as a whole.
        key_id: Who; `None` for the server's own token or nobody.
        object_id: To what, if to one thing.
        request_id: As in the server's log.
        address: Where the request came from.
        details: More.
    """

    action: str
    outcome: str
    project_id: str | None = None
    key_id: str | None = None
    object_id: str | None = None
    request_id: str | None = None
    address: str | None = None
    details: dict[str, JsonValue] = Field(default_factory=dict)


class AuditEntry(AuditEvent):
    """A line of the audit log; later ones have larger numbers."""

    number: int
    created_at: datetime


class Retention(Record):
    """How old things may get, in days; `None` keeps them for ever.

    Attributes:
        jobs_days: Finished jobs with their events, since they ended.
        audit_days: Lines of the audit log.
        plans_days: Plans, since they were first stored. Profiles and graphs follow once they
            are as old and no plan names them.
    """

    jobs_days: float | None = Field(30.0, ge=0)
    audit_days: float | None = Field(365.0, ge=0)
    plans_days: float | None = Field(None, ge=0)


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
