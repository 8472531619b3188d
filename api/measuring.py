"""Measuring a model in a process of its own, so that torch never enters the server's.

The child reads a `MeasureRequest` on stdin and writes a `Profile` on stdout. When it fails, the
last line of its stderr is ``{"error": "<class name>", "message": "..."}``, for an `InvalidInput`
with its ``field`` if it has one; everything else there goes to the server's log and no further.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress

from pydantic import ValidationError

from ..core.errors import (
    CaptureError,
    DeadlineExceeded,
    InvalidInput,
    MeasurementError,
    StagewrightError,
)
from ..core.options import MeasureRequest
from ..core.profile import Profile
from .settings import DATABASE_VARIABLE, Settings

CHILD_ERRORS: dict[str, type[StagewrightError]] = {
    error.__name__: error for error in (InvalidInput, CaptureError, MeasurementError)
}
"""Errors whose message a child addresses to the caller."""

SECRET_VARIABLES = frozenset({"STAGEWRIGHT_TOKEN", DATABASE_VARIABLE})
MAX_LOGGED_CHARACTERS = 8000

_log = logging.getLogger(__name__)


class MeasuringUnavailable(StagewrightError):
    """This server cannot measure, whatever the model."""


class ServiceStopping(StagewrightError):
    """The server was told to end while it measured."""


class MeasuringFailed(StagewrightError):
    """The child succeeded, but its profile cannot be read: a bug of ours, not of the request."""


class Measurer:
    """Measures one model at a time: timings taken side by side would disturb each other.

    Args:
        command: The child's program.
        deadline_s: Longest wait for a profile, waiting for other measurements included.
    """

    def __init__(self, command: Sequence[str], deadline_s: float) -> None:
        self._command = tuple(command)
        self._deadline_s = deadline_s
        self._turn = asyncio.Semaphore(1)
        self._work: set[asyncio.Task[Profile]] = set()

    @classmethod
    def from_settings(cls, settings: Settings) -> Measurer:
        return cls(settings.measure_command, settings.measure_deadline_s)

    async def measure(self, request: MeasureRequest) -> Profile:
        """The profile of a model. Cancelling kills the child and what it started.

        Raises:
            MeasuringUnavailable: torch is not installed here.
            InvalidInput, CaptureError, MeasurementError: The child says so.
            DeadlineExceeded: There was no profile in time; the child has been killed.
            ServiceStopping: `stop` was called meanwhile.
        """
        if importlib.util.find_spec("torch") is None:
            raise MeasuringUnavailable(
                "measuring needs torch on the server; post a profile instead, "
                "or install stagewright[torch]"
            )
        work = asyncio.create_task(self._in_turn(request))
        self._work.add(work)
        work.add_done_callback(self._work.discard)
        try:
            return await work
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise
            raise ServiceStopping("the server is stopping; ask again when it is back") from None

    def stop(self) -> None:
        """End every measurement, those that wait for their turn included, and its child."""
        for work in self._work:
            work.cancel()

    async def _in_turn(self, request: MeasureRequest) -> Profile:
        waiting = True
        try:
            async with asyncio.timeout(self._deadline_s), self._turn:
                waiting = False
                return _profile(await answer_of(self._command, request.model_dump_json().encode()))
        except TimeoutError:
            where = "waiting for another measurement to end" if waiting else "measuring"
            raise DeadlineExceeded(
                f"there was no profile after {self._deadline_s:g} s, spent {where}; lower "
                "profiling.budget_s, ask again later, or measure elsewhere and post the profile"
            ) from None


async def answer_of(command: Sequence[str], request: bytes) -> bytes:
    """What a child writes when it is given a request. Cancelling kills it and what it started.

    Raises:
        InvalidInput, CaptureError, MeasurementError: The child says so, or ended without a word.
    """
    child = await asyncio.create_subprocess_exec(
        *command,
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
        env={name: os.environ[name] for name in os.environ.keys() - SECRET_VARIABLES},
        start_new_session=True,
    )
    try:
        _offer_to_oom_killer(child)
        output, talk = await child.communicate(request)
    finally:
        await _end(child)
    if child.returncode != 0:
        raise _error(child.returncode, talk)
    return output


def _profile(output: bytes) -> Profile:
    try:
        return Profile.model_validate_json(output)
    except ValidationError as error:
        raise MeasuringFailed(f"the child's profile does not fit: {error}") from None


def _error(returncode: int | None, talk: bytes) -> StagewrightError:
    lines = talk.decode("utf-8", "replace").strip().splitlines()
    _log.warning(
        "measuring child ended with %s:\n%s", returncode, "\n".join(lines)[-MAX_LOGGED_CHARACTERS:]
    )
    reported = _reported_error(lines[-1] if lines else "")
    if reported is not None:
        return reported
    if returncode is not None and returncode < 0:
        return MeasurementError(
            f"the measuring process was ended by {signal.Signals(-returncode).name}; the model "
            "most likely needs more memory than the server has: measure a smaller one, "
            "or a smaller micro-batch"
        )
    return MeasurementError(
        "the model failed while it was built or measured, for a reason the measuring process did "
        "not foresee; the server's log has the details, and `stagewright profile` shows them"
    )


def _reported_error(line: str) -> StagewrightError | None:
    """The error of `CHILD_ERRORS` that a line of the child announces, if it does."""
    try:
        announced = json.loads(line)
        error_class, message = CHILD_ERRORS[announced["error"]], str(announced["message"])
    except (ValueError, TypeError, KeyError):
        return None
    field = announced.get("field")
    if error_class is InvalidInput and isinstance(field, str):
        return InvalidInput(message, field=field)
    return error_class(message)


def _offer_to_oom_killer(child: Process) -> None:
    """When memory runs out on Linux, the child goes and the server stays."""
    with suppress(OSError), open(f"/proc/{child.pid}/oom_score_adj", "w") as score:
        score.write("1000")


async def _end(child: Process) -> None:
    """Kill what is left of the child's process group, and collect the child."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    await child.wait()
