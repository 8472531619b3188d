"""Estimates kept between commands, so that `explain` after `plan` captures nothing again.

An entry is valid for one version of the code: the key holds what was asked, the sizes and times of
Stagewright's own files, and the versions of the packages that models are built with.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

MAX_ENTRIES = 64
"""Estimates kept, the last used; one of 80 layers takes about 100 KiB."""

PACKAGES = ("torch", "transformers", "pydantic")
ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("capture", "core", "profiler")
"""Folders whose code decides an estimate."""


def cache_folder() -> Path:
    """Return the folder of the cache, which may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "stagewright" / "estimates"


def recall_or_make(
    asked: Mapping[str, Any], make: Callable[[], dict[str, Any]], *, use: bool
) -> dict[str, Any]:
    """Return the stored answer to a question, or make and store it; both are JSON objects."""
    if not use:
        return make()
    path = _path_of(asked)
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            os.utime(path)
            return found
    made = make()
    store(asked, made)
    return made


def store(asked: Mapping[str, Any], made: Mapping[str, Any]) -> None:
    """Store the answer to a question; a folder that cannot be written is left alone."""
    path = _path_of(asked)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(made, file)
        os.replace(file.name, path)
        _forget_oldest(path.parent)


def list_entries() -> Iterator[dict[str, Any]]:
    """Yield the stored answers, the last used first."""
    with suppress(OSError):
        for path in reversed(_by_use(cache_folder())):
            with suppress(OSError, ValueError):
                yield json.loads(path.read_text(encoding="utf-8"))


def _path_of(asked: Mapping[str, Any]) -> Path:
    text = json.dumps([asked, _code()], sort_keys=True, default=_as_json)
    return cache_folder() / f"{sha256(text.encode()).hexdigest()[:32]}.json"


def _as_json(value: Any) -> Any:
    return value.model_dump(mode="json")


@cache
def _code() -> list[Any]:
    files = (path for name in SOURCES for path in sorted((ROOT / name).rglob("*.py")))
    found: list[Any] = [sys.version, [_version(name) for name in PACKAGES]]
    return [*found, [(path.stat().st_size, path.stat().st_mtime_ns) for path in files]]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _forget_oldest(folder: Path) -> None:
    for path in _by_use(folder)[:-MAX_ENTRIES]:
        path.unlink(missing_ok=True)


def _by_use(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
