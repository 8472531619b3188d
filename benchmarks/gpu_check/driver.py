"""Runs stages one after the other, whatever becomes of each, and keeps what every one found."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.child import Ended, run_child
from benchmarks.gpu_check.order import Stage
from benchmarks.gpu_check.records import Record, Setting, Status, load, save

LEAST_S = 10.0
"""Of the time that is left, for a stage to be begun at all."""

LACKING = 4
"""Exit code of a stage that needs a package which is not there."""

REPOSITORY = Path(__file__).resolve().parents[2]

Say = Callable[[str], None]


class Driver:
    """Runs stages in one setting within a number of seconds.

    Args:
        setting: Where the stages run.
        folder: Where each writes its record, and where an earlier run's are looked for.
        seconds: For all stages of this run together.
        say: Called with a line whenever a stage begins or ends.
        options: Arguments for every stage, after those of the setting.
        limit_s: Instead of each stage's own limit.
    """

    def __init__(
        self,
        setting: Setting,
        folder: Path,
        seconds: float,
        say: Say,
        *,
        options: Sequence[str] = (),
        limit_s: float | None = None,
    ) -> None:
        self._setting, self._folder, self._say = setting, folder, say
        self._options, self._limit_s = tuple(options), limit_s
        self._start, self._seconds = time.monotonic(), seconds

    def run(self, stages: Sequence[Stage], again: Collection[str] = ()) -> dict[str, Record]:
        """Run what has not passed before; return all records there are, by stage.

        Stages that no earlier run came to are first: one that failed before may fail as long again.

        Args:
            stages: In the order of their value.
            again: Names of stages to repeat although they passed.
        """
        names = [stage.name for stage in stages]
        before = load(self._folder, names, self._setting)
        settled = [name for name in names if name in before and before[name].settles]
        for name in settled:
            if name not in again:
                self._tell(f"{name}: passed before")
        left = [stage for stage in stages if stage.name in again or stage.name not in settled]
        for stage in sorted(left, key=lambda stage: _was_tried(before.get(stage.name))):
            remaining_s = self._seconds - self._elapsed_s()
            if remaining_s < min(LEAST_S, self._limit_of(stage)):
                self._tell(f"{stage.name}: not run, the minutes are over")
                continue
            record = self._run_stage(stage, remaining_s)
            save(self._folder, record)
            words = record.status if record.settles else f"{record.status}: {record.error}"
            self._tell(f"{stage.name}: {words} ({record.elapsed_s:.1f} s)")
        return load(self._folder, names, self._setting)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._start

    def _tell(self, words: str) -> None:
        self._say(f"[{self._elapsed_s():6.1f} s] {words}")

    def _limit_of(self, stage: Stage) -> float:
        return stage.limit_s if self._limit_s is None else self._limit_s

    def _run_stage(self, stage: Stage, remaining_s: float) -> Record:
        limit_s = self._limit_of(stage)
        self._tell(f"{stage.name} ... (at most {min(limit_s, remaining_s):.0f} s)")
        with tempfile.TemporaryDirectory() as name:
            output = Path(name) / "result.json"
            command = [sys.executable, *stage.arguments, "--device", self._setting.device]
            command += ["--output", str(output), "--folder", str(self._folder)]
            command += [*(["--small"] if self._setting.small else []), *self._options]
            ended = run_child(command, min(limit_s, remaining_s), REPOSITORY, environment())
            result = _read_result(output)
        status, error = _judge(ended, result, limit_s, remaining_s)
        lines = [] if status == "passed" else ended.last_lines
        elapsed_s = round(ended.elapsed_s, 2)
        return Record(stage.name, status, self._setting, elapsed_s, error, lines, result or {})


def environment() -> dict[str, str]:
    """Return the environment of stages, in which the package is imported from this checkout."""
    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


def _was_tried(record: Record | None) -> bool:
    return record is not None and record.status != "cut off"


def _read_result(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found


def _judge(
    ended: Ended, result: dict[str, Any] | None, limit_s: float, remaining_s: float
) -> tuple[Status, str]:
    """Return how a stage ended, and why in one line."""
    if ended.code is None:
        if remaining_s < limit_s:
            return "cut off", f"the minutes were over after {remaining_s:.0f} s of it"
        return "over its limit", f"took longer than {limit_s:g} s"
    said = str((result or {}).get("error", "")) or (ended.last_lines or [""])[-1]
    if ended.code == LACKING:
        return "lacking", said
    if ended.code:
        return "failed", said or f"exit code {ended.code}"
    if result is None:
        return "failed", "it wrote no result"
    return "passed", ""
