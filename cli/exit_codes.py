"""Exit codes of the command line, and the messages that errors end in.

====  =========================================================================================
code  meaning, and what the caller does next
====  =========================================================================================
0     success
1     a bug in Stagewright; report it
2     the request must change: usage, a file, an option, a model that cannot be captured or
      measured, a plan made for another model
3     infeasible within the limits given, or out of memory
4     refused; the message says what would permit it
5     unreachable: a process, a machine or a service did not answer
6     deadline exceeded, or cancelled
====  =========================================================================================
"""

from __future__ import annotations

import json
from difflib import get_close_matches
from enum import IntEnum
from typing import Any, cast

import typer

from ..core.errors import (
    Cancelled,
    DeadlineExceeded,
    ForeignError,
    Infeasible,
    OutOfMemory,
    RankFailed,
    Refused,
    StagewrightError,
)
from ..profiler.machine.memory import is_out_of_memory
from .support.flag_names import in_flags
from .support.optional_dependencies import find_missing_extra

UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])
"""Base of typer's usage errors (click's ``UsageError``), which typer does not export."""


class ExitCode(IntEnum):
    """Exit code of the process; the module's docstring has the meanings."""

    OK = 0
    BUG = 1
    USAGE = 2
    INFEASIBLE = 3
    REFUSED = 4
    UNREACHABLE = 5
    CANCELLED = 6


def exit_code(error: BaseException) -> ExitCode:
    """Return the exit code for an error that no command handled."""
    # Running out of memory first: torch raises it as a RuntimeError, or as the cause of ours.
    if isinstance(error, Infeasible | OutOfMemory) or is_out_of_memory(error):
        return ExitCode.INFEASIBLE
    stopped = DeadlineExceeded | Cancelled | TimeoutError | KeyboardInterrupt | typer.Abort
    if isinstance(error, stopped):
        return ExitCode.CANCELLED
    if isinstance(error, RankFailed | ConnectionError):
        return ExitCode.UNREACHABLE
    if isinstance(error, PermissionError | Refused):
        return ExitCode.REFUSED
    if isinstance(error, ForeignError):
        return ExitCode.BUG
    if isinstance(error, StagewrightError | UsageError) or find_missing_extra(error):
        return ExitCode.USAGE
    return ExitCode.BUG


OTHER_NAMES = {
    "--tp": ("--tensor",), "--tensor-parallel": ("--tensor",),
    "--tensor-parallel-size": ("--tensor",), "--pp": ("--stages",), "--dp": ("--max-replicas",),
}  # fmt: skip
"""Flags that are called otherwise elsewhere."""


def format_error(error: BaseException) -> str:
    """Return the message for an error that no command handled."""
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return "cancelled"
    if isinstance(error, UsageError):
        option = getattr(error, "option_name", None) or ""  # of flags that do not exist
        command = getattr(getattr(error, "ctx", None), "command", None)
        params = getattr(command, "params", ())
        known = [name for entry in params for name in entry.opts]
        near = [name for name in OTHER_NAMES.get(option, ()) if name in known]
        near += get_close_matches(option, getattr(error, "possibilities", None) or (), n=1)
        if near:
            return f"no such option: {option}; did you mean {near[0]}?"
        if option and any(entry.name == "cut" for entry in params):
            return f"no such option: {option}; a cut that begins with - goes last: -- '-ts 6,2'"
        # Typer's words for a number out of range.
        return str(error.format_message()).replace("Input should be", "it should be")
    if extra := find_missing_extra(error):
        return f"this command requires {extra.missing}; run: {extra.install}"
    if exit_code(error) is not ExitCode.BUG:
        return str(error) or type(error).__name__
    return (
        f"this is a bug in Stagewright: {type(error).__name__}: {error}\n"
        "Please report it with the output of 'stagewright doctor' and the traceback shown by "
        "'stagewright --debug ...' for this command."
    )


def report(error: BaseException, *, as_json: bool) -> None:
    """Print an error to stderr, as text or as one line of JSON."""
    if as_json:
        body = {
            "error": type(error).__name__,
            "exit_code": int(exit_code(error)),
            "detail": format_error(error),
            **_details(error),
        }
        typer.echo(json.dumps(body, default=str), err=True)
        return
    text = format_error(error)
    if isinstance(error, StagewrightError):
        text = in_flags(text)
    usage = _format_usage(error)
    if usage and text.startswith(usage[0]):  # called without arguments: the text is the help
        typer.echo(text, err=True)
    else:
        typer.echo("\n".join([f"error: {text}", *usage]), err=True)


def _format_usage(error: BaseException) -> list[str]:
    context = getattr(error, "ctx", None) if isinstance(error, UsageError) else None
    if context is None:
        return []
    return [context.get_usage(), f"Try '{context.command_path} --help'."]


def _details(error: BaseException) -> dict[str, Any]:
    """Return the attributes our own errors carry, e.g. ``required`` and ``available``."""
    if not isinstance(error, StagewrightError):
        return {}
    found = {name: value for name, value in vars(error).items() if not name.startswith("_")}
    if isinstance(error, Infeasible):
        found["ways_out"] = [
            {"text": remedy.text, "step_time_s": remedy.step_time_s} for remedy in error.remedies
        ]
    return found
