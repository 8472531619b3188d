"""Where a command's words go: results to stdout or a file, talk to stderr."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...core.errors import InvalidInput

if TYPE_CHECKING:
    from ...core.profile.profile import Profile


JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]


MIN_WIDTH = 40
"""What is printed is not made narrower."""


def emit(text: str) -> None:
    """Print a result; that its reader has gone (``| head``) is no error.

    Raises:
        InvalidInput: It cannot be written, for example to a full disk.
    """
    try:
        typer.echo(text)
    except OSError as error:
        # Python flushes stdout once more at exit, and that must not fail either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise InvalidInput(f"cannot print the result: {error.strerror or error}") from None


def output_width() -> int | None:
    """Characters in a line of the terminal; `None` where a file or a program reads.

    ``COLUMNS`` decides where it is set.
    """
    if not (os.environ.get("COLUMNS") or sys.stdout.isatty()):
        return None
    return max(MIN_WIDTH, shutil.get_terminal_size().columns)


def say(text: str, *, quiet: bool = False) -> None:
    """Tell the person at the terminal something that is not the result.

    Args:
        text: One or more lines.
        quiet: Say nothing; commands pass their ``--json``.
    """
    if not quiet:
        typer.echo(text, err=True)


def say_next(command: str, *, quiet: bool = False) -> None:
    """Name the command that follows naturally: nothing but the command, so that it pastes."""
    say(f"next: {command}", quiet=quiet)


def check_writable(path: Path) -> None:
    """Refuse an output file before the work that would fill it.

    Raises:
        InvalidInput: The folder is missing or not writable, or the path is no regular file's.
    """
    if not path.parent.is_dir():
        raise InvalidInput(f"cannot write {path}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise InvalidInput(f"cannot write {path}: the folder {path.parent} is not writable")
    if path.exists() and not path.is_file():
        raise InvalidInput(f"cannot write {path}: it exists and is not a regular file")


def write_file(path: Path, text: str) -> None:
    """Write a file, whole or not at all.

    Raises:
        InvalidInput: It cannot be written.
    """
    check_writable(path)
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise InvalidInput(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        partial.unlink(missing_ok=True)


def check_folder(path: Path) -> None:
    """Make a folder for results, before the work that would fill it.

    Raises:
        InvalidInput: It cannot be made or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(f"cannot make the folder {path}: {error.strerror or error}") from None
    check_writable(path / "file")


def profile_text(profile: Profile, *, tree: bool = True, depth: int | None = None) -> str:
    """What ``print(profile)`` shows; see `core.profile_table.format_profile`."""
    width = output_width()
    if width is not None:
        from ...view.terminal_tables import fit_profile_table

        return fit_profile_table(profile, width, tree=tree, depth=depth)
    from ...core.profile.table import format_profile

    return format_profile(profile, tree=tree, depth=depth)
