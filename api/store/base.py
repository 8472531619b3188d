"""What a store does, as a contract: one protocol for each concern, and `Store` that has them all.

Jobs have theirs in `job_contract`.

Of every method:

- A write has happened when the method returns, and is visible to every later read, of other
  threads and of other processes alike. It happens whole or not at all, whatever is killed.
- What is read equals what was written, except that a NUL in a name becomes U+FFFD.
- It may be called from several threads and processes at once. It may block: never call one on
  an event loop.
- An id of another project is not found, exactly as one that never was.
- `StoreUnavailable` is raised where the database does not answer, and nothing was written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Protocol

from ...core.graph.graph import Graph
from ...core.profile.profile import Profile
from ...core.service.documents import (
    GraphSummary,
    PlanSummary,
    ProfileSummary,
    StoredGraph,
    StoredProfile,
)
from ...core.service.plans import PlanRecord, StoredPlan
from .records import (
    Answer,
    ApiKey,
    AuditEntry,
    AuditEvent,
    FinalState,
    Job,
    JobEvent,
    JobRequest,
    JobState,
    NewApiKey,
    Page,
    Project,
    Quotas,
    Retention,
    Stored,
)


class Projects(Protocol):
    """Owners of everything else; `records.DEFAULT_PROJECT` is always there."""

    def create(self, name: str) -> Project:
        """Add a project.

        Raises:
            InvalidInput: The name is taken, or is empty or longer than 200 characters.
        """

    def get(self, project_id: str) -> Project:
        """Raises: NotFound."""

    def list(self) -> Sequence[Project]:
        """Every project, oldest first."""


class Keys(Protocol):
    """API keys. Only a hash of a secret is kept; secrets are random, so a plain one will do."""

    def create(
        self,
        project_id: str,
        *,
        name: str,
        scopes: Sequence[str],
        quotas: Quotas | None = None,
        expires_at: datetime | None = None,
    ) -> NewApiKey:
        """Make a key and its secret, which is shown this once.

        Raises:
            NotFound: There is no such project.
        """

    def by_secret(self, secret: str) -> ApiKey | None:
        """The key with that secret, unless it is revoked, has expired or never was.

        Notes its use, about once a minute.
        """

    def known(self, secret: str) -> ApiKey | None:
        """The same, if it was found less than a second ago; `None` says nothing. Never blocks.

        A key that this store revoked since is not known; one that another process revoked may be.
        """

    def list(self, project_id: str) -> Sequence[ApiKey]:
        """Every key of a project, revoked ones too, oldest first."""

    def revoke(self, project_id: str, key_id: str) -> ApiKey:
        """Let a key open nothing from now on; revoking it again changes nothing.

        Raises:
            NotFound: There is none.
        """


class Documents(Protocol):
    """Profiles, graphs and plan records, each under the id its content has.

    They never change. Storing equal content again in one project returns the first row, its
    ``created_at`` included, and adds none; in another project it is a row of its own under the
    same id. Lists give the newest first; what is added while somebody turns the pages neither
    repeats nor hides a row.

    Lists raise `InvalidInput` for a cursor that no page of the same list gave.
    """

    def put_profile(self, project_id: str, profile: Profile) -> Stored:
        """Store a profile under its ``content_id()``."""

    def profile(self, project_id: str, profile_id: str) -> StoredProfile:
        """Raises: NotFound."""

    def profile_json(self, project_id: str, profile_id: str) -> str:
        """The JSON of `profile`, as it was stored. Raises: NotFound."""

    def profile_summary(self, project_id: str, profile_id: str) -> ProfileSummary:
        """A profile as lists have it. Raises: NotFound."""

    def profiles(
        self, project_id: str, *, limit: int, cursor: str | None = None
    ) -> Page[ProfileSummary]:
        """At most ``limit`` profiles."""

    def put_graph(self, project_id: str, graph: Graph) -> Stored:
        """Store a graph under its ``content_id()``."""

    def graph(self, project_id: str, graph_id: str) -> StoredGraph:
        """Raises: NotFound."""

    def graph_json(self, project_id: str, graph_id: str) -> str:
        """The JSON of `graph`, as it was stored. Raises: NotFound."""

    def graphs(
        self, project_id: str, *, limit: int, cursor: str | None = None
    ) -> Page[GraphSummary]:
        """At most ``limit`` graphs."""

    def put_plan(
        self, project_id: str, record: PlanRecord, *, request_digest: str | None = None
    ) -> StoredPlan:
        """Store a plan record under its ``record_id()``.

        With a digest, also `Reuse.remember` it as the answer to the request of that digest.

        Raises:
            NotFound: Its profile is not stored in that project.
        """

    def plan(self, project_id: str, plan_id: str) -> StoredPlan:
        """Raises: NotFound."""

    def plan_json(self, project_id: str, plan_id: str) -> str:
        """The JSON of `plan`, as it was stored. Raises: NotFound."""

    def plan_summary(self, project_id: str, plan_id: str) -> PlanSummary:
        """A plan as lists have it. Raises: NotFound."""

    def plans(
        self, project_id: str, *, limit: int, cursor: str | None = None, search: str = ""
    ) -> Page[PlanSummary]:
        """At most ``limit`` plan records.

        With words to search for, those alone that have each of them, in letters of either case,
        in their id, model, family, devices, schedule or status.
        """


class Idempotency(Protocol):
    """First answers to requests that carry a key, for one project each.

    ::

        answer = idempotency.claim(project_id, key, digest, holder=us)
        if answer is None:                      # ours to do
            try: answer = do_it()
            except BaseException: idempotency.release(project_id, key, holder=us); raise
            answer = idempotency.complete(project_id, key, answer, holder=us)

    A claim belongs to its holder, a text made up for one attempt. One whose lease ran out and was
    taken over has lost it: what it still says of the key changes nothing.
    """

    def claim(
        self,
        project_id: str,
        key: str,
        request_digest: str,
        *,
        holder: str,
        lease_s: float = 60.0,
    ) -> Answer | None:
        """The first answer; or `None`, and the request is the caller's to answer.

        Args:
            project_id: Whose key.
            key: As the client sent it, at most 255 characters.
            request_digest: Of method, path and body.
            holder: Whose the claim is then.
            lease_s: After so long without an answer (its server died) another may claim it.

        Raises:
            KeyReused: The key was used for another request.
            AnswerPending: Another is answering it.
            InvalidInput: The key is empty or too long.
        """

    def renew(self, project_id: str, key: str, *, holder: str, lease_s: float) -> None:
        """Say that the answer is still on its way, and nobody else may claim it for so long."""

    def complete(self, project_id: str, key: str, answer: Answer, *, holder: str) -> Answer:
        """Keep the answer, for a day from the claim; the one kept, if another was first.

        Raises:
            AnswerPending: Another took the claim over, and is answering.
        """

    def release(self, project_id: str, key: str, *, holder: str) -> None:
        """Give up a claim without an answer, so that the key can be tried again."""


class Reuse(Protocol):
    """Which stored document answers a request: the same is not measured or planned twice."""

    def remember(self, project_id: str, kind: str, request_digest: str, result_id: str) -> None:
        """Note an answer's id; a later one takes its place.

        Args:
            project_id: Whose request.
            kind: E.g. ``plan`` or ``profile``.
            request_digest: Of everything the answer depends on, versions included.
            result_id: Id of the plan or profile.
        """

    def recall(self, project_id: str, kind: str, request_digest: str) -> str | None:
        """The id noted, whose document is still stored; else `None`."""


class Audit(Protocol):
    """Who did what. Nothing changes or removes a line but retention."""

    def add(self, event: AuditEvent) -> None:
        """Write a line."""

    def entries(
        self, *, project_id: str | None = None, limit: int, cursor: str | None = None
    ) -> Page[AuditEntry]:
        """Newest first, of one project or of all."""


class Store(Protocol):
    """Everything that persists."""

    @property
    def projects(self) -> Projects: ...
    @property
    def keys(self) -> Keys: ...
    @property
    def documents(self) -> Documents: ...
    @property
    def jobs(self) -> Jobs: ...
    @property
    def idempotency(self) -> Idempotency: ...
    @property
    def reuse(self) -> Reuse: ...
    @property
    def audit(self) -> Audit: ...

    def expire(self, retention: Retention) -> dict[str, int]:
        """Remove what is older than allowed and answers past their time; rows removed, by table.

        In small transactions: others read and write meanwhile. Unfinished jobs stay.
        """

    def check(self) -> None:
        """Return if the database answers and fits this release; raise any exception if not."""

    def close(self) -> None:
        """Release files and connections. Nothing may be called afterwards; closing twice may."""


class Jobs(Protocol):
    """Jobs and what happened to them (states: `job_records`).

    Who runs a job holds its attempt number. `start` makes a new attempt; from then on whatever
    an earlier one reports, results included, is refused. So of any number of workers that
    believe to run a job, one at most commits its end.
    """

    def submit(
        self, project_id: str, request: JobRequest, *, max_unfinished: int | None = None
    ) -> Job:
        """Queue a job; the one already there, whatever its state, if its ``submit_key`` is.

        Args:
            project_id: Whose job.
            request: What is to be done.
            max_unfinished: Refuse it if as many jobs of the same API key are unfinished (of the
                project, for a request without one).

        Raises:
            NotFound: There is no such project.
            TooManyJobs: ``max_unfinished`` is reached; exact, also for submissions side by side.
        """

    def get(self, project_id: str, job_id: str) -> Job:
        """Raises: NotFound."""

    def request_json(self, job_id: str) -> str:
        """What was handed in with a job of any project; nothing else reads it.

        Raises:
            NotFound: There is no such job.
        """

    def list(
        self,
        project_id: str,
        *,
        limit: int,
        cursor: str | None = None,
        state: JobState | None = None,
    ) -> Page[Job]:
        """At most ``limit`` jobs, newest first, as `contract.Documents` lists."""

    def counts(self) -> Mapping[tuple[str, JobState], int]:
        """How many jobs there are, of every project, by kind and state."""

    def unfinished(self) -> Sequence[Job]:
        """What is queued or running, of every project, oldest first: what a restart resubmits."""

    def unfinished_like(self, project_id: str, request_digest: str) -> Job | None:
        """An unfinished job with that digest, the oldest; to wait for instead of a second one."""

    def start(self, job_id: str, *, attempt: int, worker: str) -> Job | None:
        """Begin the attempt after ``attempt``, which the caller saw in the row.

        `None` if another began it first, or the job has ended or is to be cancelled.
        """

    def requeue(self, job_id: str, attempt: int) -> Job | None:
        """Give an attempt back unfinished; `None` if it is no longer the present one.

        A job that is to be cancelled is, instead.
        """

    def beat(self, job_id: str, attempt: int) -> Job | None:
        """Say that the attempt is alive, and see whether it is to be cancelled.

        `None` if it is no longer the present one or has ended: whoever runs it must stop.
        """

    def report(self, job_id: str, attempt: int, kind: str, data_json: str = "{}") -> bool:
        """Add an event, e.g. ``progress``; a sign of life too. `False` as `beat`'s `None`.

        Beyond `job_records.MAX_PROGRESS_EVENTS` the event is dropped, and the answer the same.
        """

    def finish(
        self,
        job_id: str,
        attempt: int,
        state: FinalState,
        *,
        profiles: Sequence[Profile] = (),
        graph: Graph | None = None,
        plan: PlanRecord | None = None,
        result_id: str | None = None,
        outcome_json: str | None = None,
    ) -> Job | None:
        """End a running attempt and store what it made, in one transaction.

        The result is the plan; without one the last profile, else the graph, else the document
        that ``result_id`` names, which is stored already (an answer found again).

        Returns:
            The job, or `None` if the attempt is no longer the present one or the job has ended:
            then nothing was stored.

        Raises:
            NotFound: The plan's profile is neither stored nor among ``profiles``.
        """

    def request_cancel(self, project_id: str, job_id: str) -> Job:
        """Cancel a queued job at once; ask whoever runs it to end it. Else it changes nothing.

        Raises:
            NotFound: There is no such job.
        """

    def events(
        self, project_id: str, job_id: str, *, after: int = 0, limit: int = 500
    ) -> Sequence[JobEvent]:
        """What happened after event number ``after``, in order.

        Raises:
            NotFound: There is no such job.
        """

    def latest(self, job_ids: Sequence[str], kind: str) -> dict[str, str]:
        """The data of each job's last event of a kind, as JSON, for those that have one."""
