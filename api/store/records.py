"""Records of the store other than documents: projects, keys, jobs, answers, audit log."""

from __future__ import annotations

from datetime import datetime
from typing import Generic, Literal, TypeVar

from pydantic import Field, JsonValue, ValidationError

from ...core.document import Record, to_invalid_input
from ...core.errors import InvalidInput
from ...core.service.documents import Stored as Stored
from ...core.service.keys import ApiKey as ApiKey
from ...core.service.keys import NewApiKey as NewApiKey
from ...core.service.keys import Project as Project
from ...core.service.keys import Quotas as Quotas

DEFAULT_PROJECT = "project_default"
"""Project of everything created without a key of another project; it always exists."""

Item = TypeVar("Item")
Model = TypeVar("Model", bound=Record)


def read_stored(model: type[Model], text: str, identifier: str) -> Model:
    """Parse the JSON of a stored document.

    Raises:
        InvalidInput: This release does not accept what an earlier one has stored.
    """
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        reason = to_invalid_input(error, f"document of this release, and {identifier} is older")
        raise InvalidInput(f"{reason}\nfetch it, change that, and store it again") from None


class Page(Record, Generic[Item]):
    """One page of a list, with the cursor of the next page; `None` on the last."""

    items: tuple[Item, ...]
    next_cursor: str | None = None


class Answer(Record):
    """A response, kept to be repeated for its idempotency key."""

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: str = ""


class AuditEvent(Record):
    """An action worth auditing.

    Attributes:
        action: E.g. ``plan.create``.
        outcome: ``ok`` or the kind of problem.
        project_id: `None` for the server as a whole.
        key_id: The API key used; `None` for the server's own token or without one.
        object_id: The object acted on, if it is one.
        request_id: Id of the request in the server's log.
        address: The client's address.
        details: Further values, by action.
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
    """Retention periods in days; `None` keeps rows forever.

    Attributes:
        jobs_days: Finished jobs with their events, since they ended.
        audit_days: Lines of the audit log.
        keys_days: API keys, since they were revoked or expired.
        plans_days: Plans, since they were first stored. Profiles and graphs follow once they
            are as old and no plan names them.
    """

    jobs_days: float | None = Field(30.0, ge=0)
    audit_days: float | None = Field(365.0, ge=0)
    keys_days: float | None = Field(None, ge=0)
    plans_days: float | None = Field(None, ge=0)


JobState = Literal["queued", "running", "succeeded", "failed", "cancelled"]
FinalState = Literal["succeeded", "failed", "cancelled"]
UNFINISHED: tuple[JobState, ...] = ("queued", "running")

MAX_PROGRESS_EVENTS = 10_000
"""Progress events kept per job; later ones are dropped, changes of state never."""


class JobFacts(Record):
    """A job's description without the request itself, which may be large.

    Attributes:
        kind: E.g. ``plan`` or ``profile``.
        request_digest: Equal for requests with equal answers, so that one can join another.
        submit_key: Submissions of one project with equal keys are one job. A job that failed or
            was cancelled gives up its key.
        key_id: The API key whose quota it counts towards.
        needs: The resource a worker must offer, if any.
    """

    kind: str
    request_digest: str | None = None
    submit_key: str | None = Field(None, max_length=500)
    key_id: str | None = None
    needs: str | None = None
    deadline_at: datetime | None = None


class JobRequest(JobFacts):
    """A job to submit; its request is opaque to the store."""

    request_json: str


class Job(JobFacts, Stored):
    """State of a job; `JobStore.request_json` returns its request.

    Attributes:
        attempt: Number of starts so far.
        worker: Name of the worker that runs the present attempt, whose last heartbeat was at
            ``heartbeat_at``, and which is asked to stop by ``cancel_requested``.
        result_id: Id of the plan or profile it made.
        outcome_json: The problem document of a failed job.
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


class StoredJobEvent(Record):
    """An event in a job's life.

    Attributes:
        number: Counts from 1 without gaps; clients resume after the last number they saw.
        kind: ``queued``, ``started``, ``requeued``, ``cancel-requested``, a final state, or a
            worker's report such as ``progress``.
        data_json: Further values as JSON.
    """

    number: int
    created_at: datetime
    attempt: int
    kind: str
    data_json: str = "{}"
