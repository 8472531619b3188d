"""Step folders that are whole or not there, whenever the process that writes them is killed.

A step is written under a name that nobody reads, and renamed when all of it is on the disk. One
that replaces an older one of the same step first moves that one aside, to a name that is still
read. What a dead process left is removed by the next that saves, which holds the folder's lock.

::

    step-000120/        a step: the record, torch's files, and the checksums of all of them
    step-000120.old/    the same step, while a new one takes its place
    .saving-.../        being written
    .deleting-.../      being deleted
    latest              the name of the step saved last
    .lock               held by who saves
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from ...core.errors import InvalidInput
from .checksums import SUMS, Sums, as_text, sum_of, text_size_bytes
from .manifest import RECORD, Checkpoint

LATEST, PARTIAL, LOCK, OLD = "latest", ".latest-partial", ".lock", ".old"
SAVING, DELETING = ".saving-", ".deleting-"
STEP = re.compile(rf"step-(\d+)({re.escape(OLD)})?")

Saved = tuple[Path, Checkpoint]


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def saved_steps(folder: Path) -> tuple[int, ...]:
    """The steps that can be loaded, ascending."""
    return tuple(sorted(step for step in _step_folders(folder) if _whole(folder, step)))


def find(folder: Path, step: int | None = None) -> Saved:
    """The folder and record of a step.

    Args:
        folder: Holds steps, or is one.
        step: The one that was saved last if `None`, or the highest where that one is damaged.

    Raises:
        InvalidInput: There is no such step, or it is damaged; the message lists those there are.
    """
    if (folder / RECORD).exists():
        record = check(folder)
        if step not in (None, record.step):
            raise InvalidInput(f"{folder} is step {record.step}, not {step}")
        return folder, record
    if not folder.is_dir():
        raise InvalidInput(f"there is no folder {folder}")
    if step is not None:
        return _find_step(folder, step)
    latest = _latest(folder)
    newest_first = sorted(_step_folders(folder), reverse=True)
    for candidate in newest_first if latest is None else [latest, *newest_first]:
        if found := _whole(folder, candidate):
            if latest not in (None, candidate):
                logging.getLogger(__name__).warning(
                    "step %s, saved last, is damaged; taking step %s", latest, candidate
                )
            return found
    raise InvalidInput(f"there is no checkpoint in {folder}")


def check(path: Path) -> Checkpoint:
    """Read a step's record and see that all its files have their full size.

    Raises:
        InvalidInput: The record or a file is missing, cut off or another kind of document.
    """
    record = Checkpoint.read(path / RECORD)
    for name, size_bytes in record.files.items():
        file = path / name
        found = file.stat().st_size if name == file.name and file.is_file() else None
        if found != size_bytes:
            state = "is missing" if found is None else f"has {found} of {size_bytes} bytes"
            raise InvalidInput(f"{path} is damaged: {name} {state}; load another step")
    claimed = sum(tensor.size_bytes for tensor in record.tensors().values())
    stored = sum(record.files.values())
    if claimed > stored:  # before memory is taken for them
        raise InvalidInput(
            f"{path} is damaged: its tensors have {claimed} bytes, its files {stored}; load "
            "another step"
        )
    return record


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Make the folder if needed, and keep other processes from saving into it.

    The lock goes with the process that holds it, however that one ends.

    Raises:
        InvalidInput: Another process is saving.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCK, "a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise InvalidInput(
                    f"another process is saving into {folder}; end it, or give each run a folder "
                    "of its own"
                ) from None
            # Some network file systems have no locks; there, two runs in one folder go unnoticed.
        yield


def begin(folder: Path, step: int) -> Path:
    """Remove what dead processes left, and make an empty folder to write a step into.

    Call it with the lock held.
    """
    for path in list(folder.iterdir()):
        if path.name.startswith((SAVING, DELETING)):
            shutil.rmtree(path)
    for path in list(folder.glob(f"step-*{OLD}")):
        if STEP.fullmatch(path.name):
            current = path.with_name(path.name.removesuffix(OLD))
            if current.exists():
                _delete(path)
            else:
                path.rename(current)
    started = folder / f"{SAVING}{step_name(step)}-{uuid4().hex[:12]}"
    started.mkdir()
    return started


def publish(started: Path, record: Checkpoint, sums: Sums) -> Path:
    """Give a written step its name, and make it the latest.

    Args:
        started: What `begin` made, with all tensors in it, on the disk.
        record: Of the step; its ``files`` are filled in here.
        sums: Checksums of the files in it.
    """
    files = {path.name: path.stat().st_size for path in started.iterdir()}
    files[SUMS] = text_size_bytes((*sums, RECORD))
    record = record.model_copy(update={"files": files})
    _write(started / RECORD, record.to_json() + "\n")
    _write(started / SUMS, as_text({**sums, RECORD: sum_of(started / RECORD)}))
    folder = started.parent
    path = folder / step_name(record.step)
    old = path.with_name(path.name + OLD)
    if path.exists():
        path.rename(old)
    started.rename(path)
    _sync(folder)
    partial = folder / PARTIAL
    _write(partial, path.name + "\n")
    partial.replace(folder / LATEST)
    _sync(folder)
    if old.exists():
        _delete(old)
    return path


def keep_newest(folder: Path, count: int) -> None:
    """Delete all but the steps saved last; that of `latest` is among them."""
    steps = [(_saved_at(path), step, path) for step, path in _step_folders(folder).items()]
    for _, step, path in sorted(steps, reverse=True)[count:]:
        if step != _latest(folder):
            _delete(path)


def abandon(started: Path) -> None:
    """Remove what was written of a step that is not to be."""
    shutil.rmtree(started, ignore_errors=True)


def _find_step(folder: Path, step: int) -> Saved:
    path = _step_folders(folder).get(step)
    if path is not None:
        return path, check(path)
    steps = ", ".join(map(str, saved_steps(folder))) or "none"
    raise InvalidInput(f"{folder} has no step {step}; it has {steps}")


def _step_folders(folder: Path) -> dict[int, Path]:
    """Every step's folder; one that was moved aside only where nothing took its place."""
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir(), reverse=True) if folder.is_dir() else ():
        if match := STEP.fullmatch(path.name):
            found[int(match[1])] = path  # "step-1" sorts before "step-1.old", so it comes last
    return found


def _whole(folder: Path, step: int) -> Saved | None:
    path = _step_folders(folder).get(step)
    if path is None:
        return None
    try:
        return path, check(path)
    except InvalidInput:
        return None


def _latest(folder: Path) -> int | None:
    try:
        match = STEP.fullmatch((folder / LATEST).read_text(encoding="utf-8").strip())
    except (OSError, UnicodeDecodeError):
        return None
    return int(match[1]) if match else None


def _saved_at(path: Path) -> int:
    """In nanoseconds; 0 for a damaged step, which goes first."""
    try:
        return (path / RECORD).stat().st_mtime_ns
    except OSError:
        return 0


def _delete(path: Path) -> None:
    """Under another name first, so that no half of it is ever taken for a step."""
    doomed = path.with_name(f"{DELETING}{path.name}-{uuid4().hex[:12]}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def _write(path: Path, text: str) -> None:
    """Write a file and wait until the disk has it."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Wait until the disk has the folder's names."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
