"""What a store does with jobs, as a contract; what `contract` says of every method holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ...core.graph.graph import Graph
from ...core.profile.profile import Profile
from ...core.service.plans import PlanRecord
from .job_records_tomerge import FinalState, Job, JobEvent, JobRequest, JobState
from .records import Page


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
