"""What the process answers: every error becomes one of seven exit codes.

====  =========================================================================================
code  meaning, and what the caller does next
====  =========================================================================================
0     done
1     a bug in Stagewright; report it
2     the request has to change: usage, a file, an option, a model that cannot be captured or
      measured, a plan made for another model
3     nothing satisfies the limits, or memory ran out
4     refused: not allowed here
5     something did not answer: a process, a machine, a service
6     the time allowed ran out, or the command was cancelled
====  =========================================================================================
"""

from __future__ import annotations

import json
from enum import IntEnum
from typing import Any, cast

import typer

from ..core.errors import (
    Cancelled,
    DeadlineExceeded,
    Infeasible,
    OutOfMemory,
    RankFailed,
    Refused,
    StagewrightError,
)
from ..profiler.machine.out_of_memory import is_out_of_memory
from .support.flag_names import in_flags
from .support.optional_dependencies import missing_extra

UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])
"""What typer raises for a wrong option or argument; it has no public name for it."""


class ExitCode(IntEnum):
    """See the table above."""

    OK = 0
    BUG = 1
    USAGE = 2
    INFEASIBLE = 3
    REFUSED = 4
    UNREACHABLE = 5
    CANCELLED = 6


def exit_code(error: BaseException) -> ExitCode:
    """The code for an error that reached the top."""
    if isinstance(error, Infeasible | OutOfMemory) or is_out_of_memory(error):
        return ExitCode.INFEASIBLE
    stopped = DeadlineExceeded | Cancelled | TimeoutError | KeyboardInterrupt | typer.Abort
    if isinstance(error, stopped):
        return ExitCode.CANCELLED
    if isinstance(error, RankFailed | ConnectionError):
        return ExitCode.UNREACHABLE
    if isinstance(error, PermissionError | Refused):
        return ExitCode.REFUSED
    if isinstance(error, StagewrightError | UsageError) or missing_extra(error):
        return ExitCode.USAGE
    return ExitCode.BUG


def message(error: BaseException) -> str:
    """What to tell a person about an error that reached the top."""
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return "cancelled"
    if isinstance(error, UsageError):
        return str(error.format_message())
    if extra := missing_extra(error):
        return f"this command needs {extra.missing}; run: {extra.install}"
    if exit_code(error) is not ExitCode.BUG:
        return str(error) or type(error).__name__
    return (
        f"this is a bug in Stagewright: {type(error).__name__}: {error}\n"
        "Please report it with what 'stagewright doctor' prints and the traceback that "
        "'stagewright --debug ...' shows for the same command."
    )


def report(error: BaseException, *, as_json: bool) -> None:
    """Tell about an error on stderr, as text or as one line of JSON."""
    if as_json:
        body = {
            "error": type(error).__name__,
            "exit_code": int(exit_code(error)),
            "detail": message(error),
            **_details(error),
        }
        typer.echo(json.dumps(body, default=str), err=True)
        return
    text = message(error)
    if isinstance(error, StagewrightError):
        text = in_flags(text)
    usage = _usage(error)
    if usage and text.startswith(usage[0]):  # no words at all: the help
        typer.echo(text, err=True)
    else:
        typer.echo("\n".join([f"error: {text}", *usage]), err=True)


def _usage(error: BaseException) -> list[str]:
    """How the command is called, where it was called wrongly."""
    context = getattr(error, "ctx", None) if isinstance(error, UsageError) else None
    if context is None:
        return []
    return [context.get_usage(), f"Try '{context.command_path} --help'."]


def _details(error: BaseException) -> dict[str, Any]:
    """The attributes our own errors carry, e.g. ``required`` and ``available``."""
    if not isinstance(error, StagewrightError):
        return {}
    found = {name: value for name, value in vars(error).items() if not name.startswith("_")}
    if isinstance(error, Infeasible):
        found["ways_out"] = [
            {"text": way_out.text, "step_time_s": way_out.step_time_s} for way_out in error.ways_out
        ]
    return found
