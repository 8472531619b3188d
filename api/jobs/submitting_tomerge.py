"""Handing a job to the store in the name of whoever asks, within their quota."""

from __future__ import annotations

from ..auth.principal import Caller
from ..store.job_contract_tomerge import Jobs
from ..store.job_records_tomerge import Job, JobRequest


def submit(jobs: Jobs, caller: Caller, request: JobRequest) -> Job:
    """Queue a job of the caller's project.

    It counts for the caller's key until it ends; those of the server's own token count together.

    Raises:
        TooManyJobs: As many jobs of that key are unfinished as it may have; 429.
    """
    owned = request.model_copy(update={"key_id": caller.id})
    limit = caller.quotas.max_unfinished_jobs
    return jobs.submit(caller.project_id, owned, max_unfinished=limit)
