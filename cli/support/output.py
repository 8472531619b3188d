"""Output of commands: results to stdout or a file, everything else to stderr."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from ...core.errors import InvalidInput
from .next_steps import suggest_planning

if TYPE_CHECKING:
    from ...core.profile.profile import Profile

JsonFlag = Annotated[bool, Option("--json", help="Print one JSON document to stdout.")]
NoCacheFlag = Annotated[
    bool, Option("--no-cache", help="Estimate anew, and do not keep the estimate.")
]
VerboseFlag = Annotated[
    bool, Option("--verbose", "-v", help="Print both bounds of the proof, with their values.")
]


PARAMETERS: ContextVar[Mapping[str, Any]] = ContextVar("PARAMETERS", default=MappingProxyType({}))
"""Parameters of the command that runs."""

MIN_WIDTH = 40
"""Narrowest layout of tables, in characters; a narrower terminal wraps the lines."""


def emit(text: str) -> None:
    """Print a result to stdout; a reader that closed the pipe (``| head``) is not an error."""
    try:
        typer.echo(text)
    except OSError as error:
        # Python flushes stdout once more at exit, and that must not fail either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise InvalidInput(f"cannot write to stdout: {error.strerror or error}") from None


def output_width() -> int | None:
    """Return the width of the terminal in characters; `None` if stdout is not a terminal.

    ``COLUMNS`` takes precedence if it is set.
    """
    if not (os.environ.get("COLUMNS") or sys.stdout.isatty()):
        return None
    return max(MIN_WIDTH, shutil.get_terminal_size().columns)


def say(text: str, *, quiet: bool = False) -> None:
    """Print a message to stderr, unless ``quiet``; commands pass their ``--json`` for it."""
    if not quiet:
        typer.echo(text, err=True)


def say_next(command: str, *, quiet: bool = False) -> None:
    """Suggest the next command on a line of its own that can be copied and pasted."""
    say(f"next: {command}", quiet=quiet)


def check_writable(path: Path | None) -> None:
    """Check an output path, if one is given, before the work whose result goes there."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise InvalidInput(f"cannot write {path}: folder {path.parent} does not exist")
    if not os.access(path.parent, os.W_OK):
        raise InvalidInput(f"cannot write {path}: folder {path.parent} is not writable")
    if path.exists() and not path.is_file():
        raise InvalidInput(f"cannot write {path}: it exists and is not a regular file")
    _refuse_input(path)


def _refuse_input(path: Path) -> None:
    """Refuse an output that is also an input, which writing would destroy."""
    for name, value in PARAMETERS.get().items():
        for given in value if isinstance(value, (list, tuple)) else (value,):
            if name == "output" or given is path or not isinstance(given, (str, Path)):
                continue
            if os.path.exists(given) and path.exists() and path.samefile(given):
                raise InvalidInput(f"cannot write {path}: it is an input; give another file")


def write_file(path: Path, text: str) -> None:
    """Write a file atomically; raise `InvalidInput` if that fails."""
    check_writable(path)
    partial = path.with_name(path.name + ".partial")
    # Renaming is atomic, so that readers and a failure halfway leave no truncated file.
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise InvalidInput(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        partial.unlink(missing_ok=True)


def check_folder(path: Path) -> None:
    """Create a folder for results; raise `InvalidInput` if it cannot be created or written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"cannot create folder {path}: {error.strerror or error}") from None
    check_writable(path / "file")


def profile_text(profile: Profile, *, tree: bool = True, depth: int | None = None) -> str:
    """Format a profile as `core.profile.table.format_profile` does, fitted to the terminal."""
    width = output_width()
    if width is not None:
        from ...view.terminal import fit_profile_table

        return fit_profile_table(profile, width, tree=tree, depth=depth)
    from ...core.profile.table import format_profile

    return format_profile(profile, tree=tree, depth=depth)


def finish_profile(profile: Profile, output: Path, *, as_json: bool) -> None:
    """Write a profile to a file, print it, and suggest the command that plans with it."""
    document = profile.to_json(indent=2)
    write_file(output, document + "\n")
    emit(document if as_json else profile_text(profile))
    say(f"wrote {output}", quiet=as_json)
    say_next(suggest_planning(profile, output), quiet=as_json)
