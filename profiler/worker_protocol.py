"""Both ends of a worker process: a request on standard input, the answer on standard output.

Progress goes to standard error as JSON lines with ``done``, ``total`` and ``layer``; on failure the
last line there is the JSON of an `ErrorRecord`, and the exit code is not 0.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from typing import TextIO, TypeVar

from pydantic import ValidationError

from ..core.document import Record, to_invalid_input
from ..core.errors import MeasurementError, StagewrightError
from ..core.process_exit import count_memory_kills, describe_exit
from ..core.profile.profile import Profile
from ..core.progress import Progress
from ..core.requests.requests import MeasureRequest

COMMAND = (sys.executable, "-m", "stagewright.profiler.measure_worker")

RequestT = TypeVar("RequestT", bound=Record)


def serve(
    kind: type[RequestT], what: str, answer: Callable[[RequestT], str], output: TextIO | None = None
) -> int:
    """Answer the request on standard input, to standard output by default; return an exit code."""
    try:
        try:
            request = kind.model_validate_json(sys.stdin.read())
        except ValidationError as error:
            raise to_invalid_input(error, what) from None
        text = answer(request)
    except StagewrightError as error:
        tell_error(error)
        return 1
    (output or sys.stdout).write(text)
    return 0


def tell_progress(done: int, total: int, layer: str) -> None:
    _tell(done=done, total=total, layer=layer)


def tell_error(error: StagewrightError) -> None:
    _tell(**error.to_record().as_dict)


def _tell(**message: object) -> None:
    sys.stderr.write(json.dumps(message) + "\n")
    sys.stderr.flush()


def measure_apart(
    request: MeasureRequest, progress: Progress | None = None, *, command: Iterable[str] = COMMAND
) -> Profile:
    """Measure what a request describes in a process of its own, which a crash ends alone.

    Raises what the process says went wrong, or `MeasurementError` if it ended without a word.
    """
    kills = count_memory_kills()
    with tempfile.TemporaryFile("w+b") as given, tempfile.TemporaryFile("w+b") as answer:
        given.write(request.model_dump_json().encode())
        given.seek(0)
        process = subprocess.Popen(
            [*command], stdin=given, stdout=answer, stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        told: dict[str, object] = {}
        layer, last = "", ""
        try:
            for line in process.stderr:
                last = line.strip() or last
                told = _message(line) or told
                if "layer" in told:
                    layer = str(told["layer"])
                    if progress is not None and "done" in told:
                        progress(int(str(told["done"])), int(str(told["total"])), layer)
            process.wait()
        finally:
            process.kill()
            process.wait()
            process.stderr.close()
        if process.returncode == 0:
            answer.seek(0)
            return Profile.from_json(answer.read())
    if "message" in told:
        raise MeasurementError.from_record(told)
    how = describe_exit(process.returncode, kills)
    raise MeasurementError(
        f"the process that measured {how}"
        + (f": {last}" if process.returncode > 0 else "")
        + (f", while it measured {layer}" if layer else ", before it measured a layer")
        + "; an operator crashed on its arguments, or the process was stopped: capture the model "
        "again, or use a smaller micro-batch"
    )


def _message(line: str) -> dict[str, object]:
    try:
        told = json.loads(line)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}
