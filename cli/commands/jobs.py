"""``stagewright jobs``: list, show, watch and cancel a service's jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from ...core.errors import InvalidInput
from ..options.service import Token
from ..support.next_steps import command_line
from ..support.output import JsonFlag, emit, say, say_next
from ..support.service import open_client

if TYPE_CHECKING:
    from ...client.client import Client
    from ...core.service.jobs import JobEvent, JobView


Action = Literal["list", "show", "watch", "cancel"]
State = Literal["queued", "running", "succeeded", "failed", "cancelled"]


def command(
    action: Annotated[Action, Argument(metavar="ACTION", help="What to do, as described above.")],
    job_id: Annotated[
        str | None, Argument(metavar="ID", help="Id of the job, for all actions but list.")
    ] = None,
    server: Annotated[
        str | None,
        Option(
            metavar="URL",
            help="URL of the service (also STAGEWRIGHT_SERVER).",
            show_default="http://127.0.0.1:8000",
        ),
    ] = None,
    token: Token = None,
    state: Annotated[State | None, Option(help="For list: only jobs in this state.")] = None,
    limit: Annotated[int, Option(min=1, max=500, help="For list: maximum number of jobs.")] = 20,
    as_json: JsonFlag = False,
) -> None:
    """List a service's jobs, show one, watch it until it finishes, or cancel it.

    watch finishes as the job does: with its result, or with the error it failed with.
    """
    if action == "list":
        if job_id is not None:
            raise InvalidInput("list takes no id: stagewright jobs list, or jobs show ID")
    elif job_id is None:
        raise InvalidInput(f"missing job id: stagewright jobs {action} ID")
    with open_client(server, token, quiet=as_json) as client:
        if job_id is None:
            _list(client, state, limit, as_json=as_json)
        elif action == "watch":
            _show(client, _watch(client, job_id, quiet=as_json), as_json=as_json)
        elif action == "show":
            _show(client, client.job(job_id), as_json=as_json)
        else:
            _show(client, client.cancel(job_id), as_json=as_json)


def _list(client: Client, state: State | None, limit: int, *, as_json: bool) -> None:
    from ...core.text_table import format_table

    found = client.jobs(state=state, limit=limit)
    if as_json:
        emit(found.model_dump_json())
        return
    if not found.jobs:
        emit(f"no {state} jobs" if state else "no jobs")
        return
    headings = ("job", "kind", "state", "created", "detail")
    rows = [
        (job.id, job.kind, job.state, f"{job.created_at:%Y-%m-%d %H:%M:%S}", detail(job))
        for job in found.jobs
    ]
    emit(format_table([headings, *rows]))
    if found.next_cursor is not None:
        say(f"showing the newest {limit}; use --limit to show more")
    say_next(command_line("jobs", "show", found.jobs[0].id, "--server", client.settings.url))


def detail(job: JobView) -> str:
    """Return a job's result id, its problem, its message or its progress, whichever it has."""
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


def _watch(client: Client, job_id: str, *, quiet: bool) -> JobView:
    import sys

    from ...client.progress import describe_event

    def print_event(event: JobEvent) -> None:
        say(describe_event(event), quiet=quiet)

    # On a terminal the client draws a bar; a log gets one line per event.
    return client.wait(job_id, progress=not quiet if sys.stderr.isatty() else print_event)


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
    if text := detail(job):
        lines.append(f"  {sanitize(text)}")
    emit("\n".join(lines))
    server = ("--server", client.settings.url)
    if job.result is not None:
        say_next(command_line("show", job.result.id, *server))
    else:
        say_next(command_line("jobs", "list" if job.is_finished else "watch",
                              *([] if job.is_finished else [job.id]), *server))  # fmt: skip
