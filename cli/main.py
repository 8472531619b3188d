"""The ``stagewright`` command: registers all commands and turns errors into exit codes."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from itertools import takewhile
from keyword import iskeyword
from typing import Annotated

import typer
from typer.main import get_command

from .. import __version__
from .exit_codes import ExitCode, exit_code, report
from .help import HELP_ALL, SUMMARIES, GroupedCommand, Overview

COMMANDS = tuple(SUMMARIES)
"""Modules of `commands`, in the order of ``--help``; each has a function ``command``.

All of them are imported on every start, also for ``--help``, so they import slow packages (torch,
pydantic, rich) inside functions.
"""

DEBUG_VARIABLE = "STAGEWRIGHT_DEBUG"
INTERRUPTED = 130
"""Value that typer returns, instead of raising, after Ctrl-C."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, by default this process's, and return its exit code; see `exit_codes`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        # Not standalone: typer would print usage errors and exit with codes of its choice.
        code = get_command(build_app()).main(
            ["--help" if word == HELP_ALL else word for word in words],
            prog_name="stagewright",
            standalone_mode=False,
            obj=tuple(words),
        )
        if code == INTERRUPTED:
            raise KeyboardInterrupt
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - every error ends here
        if _wants_traceback(words):
            traceback.print_exception(error)
        report(error, as_json="--json" in words)
        return exit_code(error)
    return int(code or ExitCode.OK)


def build_app() -> typer.Typer:
    """Build the application with all `COMMANDS`."""
    app = typer.Typer(
        name="stagewright",
        cls=Overview,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # importing rich would triple the time of --help
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_show_overview)
    for name in COMMANDS:
        # A module cannot be called by a keyword of Python, such as import.
        module_name = f"{name}_" if iskeyword(name) else name
        module = importlib.import_module(f".commands.{module_name}", __package__)
        app.command(name, cls=GroupedCommand)(module.command)
    return app


def _show_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"stagewright {__version__}")
        raise typer.Exit


def _show_overview(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help=f"Show tracebacks (also {DEBUG_VARIABLE}=1).")
    ] = False,
) -> None:
    """Plan and run pipeline parallelism for PyTorch models.

    Results go to stdout, everything else to stderr. With --json, stdout holds one JSON document
    and an error is one line of JSON on stderr. Exit codes: 0 ok, 1 bug, 2 usage, 3 infeasible
    or out of memory, 4 refused, 5 unreachable, 6 deadline or cancelled.
    """


def _wants_traceback(words: Sequence[str]) -> bool:
    # Read by hand: the error may be that the words cannot be parsed.
    before_command = takewhile(lambda word: word.startswith("-"), words)
    return "--debug" in before_command or bool(os.environ.get(DEBUG_VARIABLE))
