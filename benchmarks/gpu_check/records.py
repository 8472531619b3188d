"""Results of stages on disk, one file a stage, so that a later run goes on where one ended."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, field
from pathlib import Path
from typing import Any, Literal

from pydantic.dataclasses import dataclass

Status = Literal["passed", "failed", "over its limit", "lacking", "cut off"]
"""``lacking``: a package is missing, which the error names. ``cut off``: the minutes were over."""


@dataclass(frozen=True)
class Setting:
    """Setting that stages run in; a result counts only for the one it was made in."""

    device: str
    device_name: str
    torch: str
    small: bool


@dataclass(frozen=True)
class Record:
    """Outcome of one stage.

    Attributes:
        error: One line; empty if it passed.
        last_lines: The end of what the stage printed, if it did not pass.
        result: What the stage wrote, whether or not it passed.
    """

    stage: str
    status: Status
    setting: Setting
    elapsed_s: float
    error: str = ""
    last_lines: list[str] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def settles(self) -> bool:
        """Return True if a later run need not repeat the stage."""
        return self.status == "passed"


def save(folder: Path, record: Record) -> None:
    """Write a record to its file at once, or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{record.stage}.json"
    unfinished.write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")
    unfinished.replace(folder / f"{record.stage}.json")


def load(folder: Path, stages: Iterable[str], setting: Setting) -> dict[str, Record]:
    """Return the records of these stages that were made in this setting."""
    found = {}
    for stage in stages:
        path = folder / f"{stage}.json"
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            record = Record(**{**values, "setting": Setting(**values["setting"])})
        except (OSError, ValueError, KeyError, TypeError):
            continue  # no file, or one that something else wrote
        if record.setting == setting:
            found[stage] = record
    return found
