"""Atomic step folders: complete or absent, even if the process that writes them is killed.

A step is written under a temporary name that no reader looks at, and renamed once it is on disk. If
it replaces an older save of the same step, that one is first moved to a name that is still read.
Remains of killed processes are removed by the next save, under the folder's lock.

::

    step-000120/        a step: the manifest, torch's files, and the checksums of all of them
    step-000120.old/    its previous save, while a new one takes its place
    .saving-.../        being written
    .deleting-.../      being deleted
    latest              the name of the latest step
    .lock               held while saving
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
from .checksums import SUMS, Sums, compute_sum, format_sums, text_size_bytes
from .manifest import RECORD, Checkpoint

LATEST, PARTIAL, LOCK, OLD = "latest", ".latest-partial", ".lock", ".old"
SAVING, DELETING = ".saving-", ".deleting-"
STEP = re.compile(rf"step-(\d+)({re.escape(OLD)})?")

Saved = tuple[Path, Checkpoint]


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def list_steps(folder: Path) -> tuple[int, ...]:
    """List the loadable steps in ascending order."""
    return tuple(sorted(step for step in _step_folders(folder) if _read_if_whole(folder, step)))


def find_step(folder: Path, step: int | None = None) -> Saved:
    """Find a step; return its folder and manifest.

    ``folder`` holds steps or is the folder of one. Without a number the latest is found, or the
    highest one if that is damaged.
    """
    if (folder / RECORD).exists():
        record = check_step(folder)
        if step not in (None, record.step):
            raise InvalidInput(f"{folder} is step {record.step}, not {step}")
        return folder, record
    if not folder.is_dir():
        raise InvalidInput(f"folder {folder} does not exist")
    if step is not None:
        return _find_numbered(folder, step)
    latest = _latest(folder)
    newest_first = sorted(_step_folders(folder), reverse=True)
    for candidate in newest_first if latest is None else [latest, *newest_first]:
        if found := _read_if_whole(folder, candidate):
            if latest not in (None, candidate):
                logging.getLogger(__name__).warning(
                    "the latest step %s is damaged; using step %s", latest, candidate
                )
            return found
    raise InvalidInput(f"no checkpoint found in {folder}")


def check_step(path: Path) -> Checkpoint:
    """Read a step's manifest and check that no file is missing, truncated or of another kind."""
    record = Checkpoint.read(path / RECORD)
    for name, size_bytes in record.files.items():
        file = path / name
        # Only names in this folder: a forged manifest must not point elsewhere.
        found = file.stat().st_size if name == file.name and file.is_file() else None
        if found != size_bytes:
            state = "is missing" if found is None else f"has {found} of {size_bytes} bytes"
            raise InvalidInput(f"{path} is damaged: {name} {state}; load another step")
    claimed = sum(tensor.size_bytes for tensor in record.tensors().values())
    stored = sum(record.files.values())
    if claimed > stored:  # before a forged manifest makes the reader allocate that much
        raise InvalidInput(
            f"{path} is damaged: its tensors have {claimed} bytes, but its files {stored}; load "
            "another step"
        )
    return record


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Create the folder if needed, and lock it against saves of other processes.

    The kernel releases the lock when the process ends, even if it is killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Never deleted: two processes could then lock two different files of this name.
    with open(folder / LOCK, "a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise InvalidInput(
                    f"another process is saving into {folder}; stop it, or use a separate folder "
                    "for each run"
                ) from None
            # Some network file systems lack locks; there, two runs in one folder go unnoticed.
        yield


def begin_step(folder: Path, step: int) -> Path:
    """Clean up after killed processes, and create an empty folder to write a step into.

    Call it with the lock held.
    """
    for path in list(folder.iterdir()):
        if path.name.startswith((SAVING, DELETING)):
            shutil.rmtree(path)
    for path in list(folder.glob(f"step-*{OLD}")):
        if STEP.fullmatch(path.name):
            current = path.with_name(path.name.removesuffix(OLD))
            # Killed after the new save got its name: the old one is superfluous. Killed before:
            # the old one is the only save of the step.
            if current.exists():
                _delete(path)
            else:
                path.rename(current)
    started = folder / f"{SAVING}{step_name(step)}-{uuid4().hex[:12]}"
    started.mkdir()
    return started


def publish_step(started: Path, record: Checkpoint, sums: Sums) -> Path:
    """Give a written step its final name and make it the latest.

    ``started`` comes from `begin_step`, with all tensors on disk; the record's ``files`` are filled
    in here.
    """
    files = {path.name: path.stat().st_size for path in started.iterdir()}
    # The manifest states the size of the checksum file, which in turn contains the manifest's
    # checksum; the size is known beforehand, as all checksums are of one length.
    files[SUMS] = text_size_bytes((*sums, RECORD))
    record = record.model_copy(update={"files": files})
    _write(started / RECORD, record.to_json() + "\n")
    _write(started / SUMS, format_sums({**sums, RECORD: compute_sum(started / RECORD)}))
    folder = started.parent
    path = folder / step_name(record.step)
    old = path.with_name(path.name + OLD)
    # The old save keeps a readable name until the new one has its own; every rename is synced
    # before the next change relies on it.
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
    """Delete all but the most recently saved steps; the latest one is always kept."""
    steps = [(_saved_at(path), step, path) for step, path in _step_folders(folder).items()]
    for _, step, path in sorted(steps, reverse=True)[count:]:
        if step != _latest(folder):
            _delete(path)


def abandon_step(started: Path) -> None:
    """Remove a partly written step."""
    shutil.rmtree(started, ignore_errors=True)


def _find_numbered(folder: Path, step: int) -> Saved:
    path = _step_folders(folder).get(step)
    if path is not None:
        return path, check_step(path)
    steps = ", ".join(map(str, list_steps(folder))) or "none"
    raise InvalidInput(f"{folder} has no step {step}; it has {steps}")


def _step_folders(folder: Path) -> dict[int, Path]:
    """Return each step's folder; its old save only if no new one took its place."""
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir(), reverse=True) if folder.is_dir() else ():
        if match := STEP.fullmatch(path.name):
            found[int(match[1])] = path  # "step-1" sorts before "step-1.old", so it comes last
    return found


def _read_if_whole(folder: Path, step: int) -> Saved | None:
    path = _step_folders(folder).get(step)
    if path is None:
        return None
    try:
        return path, check_step(path)
    except InvalidInput:
        return None


def _latest(folder: Path) -> int | None:
    try:
        match = STEP.fullmatch((folder / LATEST).read_text(encoding="utf-8").strip())
    except (OSError, UnicodeDecodeError):
        return None
    return int(match[1]) if match else None


def _saved_at(path: Path) -> int:
    """Return the time of saving in nanoseconds; 0 for a damaged step, to be deleted first."""
    try:
        return (path / RECORD).stat().st_mtime_ns
    except OSError:
        return 0


def _delete(path: Path) -> None:
    # Renamed first, so that a partly deleted folder is never taken for a step.
    doomed = path.with_name(f"{DELETING}{path.name}-{uuid4().hex[:12]}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def _write(path: Path, text: str) -> None:
    """Write a file and sync it to disk."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    # Syncing a file makes its contents durable; its name is in the folder.
    _sync(path.parent)


def _sync(folder: Path) -> None:
    """Sync the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
