"""``stagewright jobs``: what a service is measuring, has measured and will measure."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from ...core.errors import InvalidInput
from ..options.server import Token, client_of
from ..support.next_steps import command_line
from ..support.output import JsonFlag, emit, say, say_next

if TYPE_CHECKING:
    from ...client.sync_client import Client
    from ...core.service.jobs import JobEvent, JobView


class Action(Enum):
    """What to do with jobs."""

    LIST = "list"
    SHOW = "show"
    WATCH = "watch"
    CANCEL = "cancel"


class State(Enum):
    """Which jobs to list."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


def command(
    action: Annotated[Action, Argument(help="What to do; see below.")],
    which: Annotated[str | None, Argument(metavar="ID", help="The job, for all but list.")] = None,
    server: Annotated[
        str | None,
        Option(
            metavar="URL",
            help="The service; STAGEWRIGHT_SERVER if not given.",
            show_default="http://127.0.0.1:8000",
        ),
    ] = None,
    token: Token = None,
    state: Annotated[State | None, Option(help="Only jobs in this state (list).")] = None,
    limit: Annotated[int, Option(min=1, max=500, help="How many, at most (list).")] = 20,
    as_json: JsonFlag = False,
) -> None:
    """List the jobs of a service, show one, follow it to its end, or cancel it.

    watch ends as the job does: with its result, or with the error it failed with.
    """
    if (action is Action.LIST) != (which is None):
        raise InvalidInput(
            "list takes no id, the others take a job's: stagewright jobs list, "
            f"jobs {action.value if action is not Action.LIST else 'show'} ID"
        )
    with client_of(server, token, quiet=as_json) as client:
        if action is Action.LIST:
            _list(client, state, limit, as_json=as_json)
        elif action is Action.WATCH:
            _show(client, _watched(client, which or "", quiet=as_json), as_json=as_json)
        elif action is Action.SHOW:
            _show(client, client.job(which or ""), as_json=as_json)
        else:
            _show(client, client.cancel(which or ""), as_json=as_json)


def _list(client: Client, state: State | None, limit: int, *, as_json: bool) -> None:
    from ...core.text_table import format_table

    found = client.jobs(state=None if state is None else state.value, limit=limit)
    if as_json:
        emit(found.model_dump_json())
        return
    if not found.jobs:
        emit("there are no such jobs" if state else "there are no jobs")
        return
    headings = ("job", "kind", "state", "made", "what")
    emit(format_table([headings, *(_row(job) for job in found.jobs)]))
    if found.next_cursor is not None:
        say(f"these are the newest {limit}; --limit shows more")
    say_next(command_line("jobs", "show", found.jobs[0].id, "--server", client.settings.url))


def _row(job: JobView) -> tuple[str, ...]:
    return (job.id, job.kind, job.state, f"{job.created_at:%Y-%m-%d %H:%M:%S}", what(job))


def what(job: JobView) -> str:
    """What there is to say of a job: its result, its problem, what it waits for or is at."""
    if job.result is not None:
        return job.result.id
    if job.problem is not None:
        return job.problem.detail.splitlines()[0]
    if job.message is not None:
        return job.message
    if job.progress:
        done, total = job.progress.get("done"), job.progress.get("total")
        counted = "" if done is None or total is None else f" {done}/{total}"
        return f"{job.progress.get('step', '')}{counted}".strip()
    return ""


def _watched(client: Client, job_id: str, *, quiet: bool) -> JobView:
    import sys

    from ...client.progress import describe_event

    def tell(event: JobEvent) -> None:
        say(describe_event(event), quiet=quiet)

    return client.wait(job_id, progress=not quiet if sys.stderr.isatty() else tell)


def _show(client: Client, job: JobView, *, as_json: bool) -> None:
    from ...core.text_table import sanitize

    if as_json:
        emit(job.model_dump_json(indent=2))
        return
    lines = [f"{job.id}: {job.kind} job, {job.state}"]
    if job.attempt > 1:
        lines.append(f"  attempt {job.attempt}")
    if job.needs:
        lines.append(f"  needs {', '.join(f'{n:g} {kind}' for kind, n in job.needs.items())}")
    if text := what(job):
        lines.append(f"  {sanitize(text)}")
    emit("\n".join(lines))
    server = ("--server", client.settings.url)
    if job.result is not None:
        say_next(command_line("show", job.result.id, *server))
    else:
        say_next(command_line("jobs", "list" if job.is_finished else "watch",
                              *([] if job.is_finished else [job.id]), *server))  # fmt: skip
