"""Measuring what was sent, in a child; a job calls this on its worker."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from ...core.errors import Refused, StagewrightError
from ...core.options import MeasureRequest
from ...core.profile import Profile
from .limits import Limits, default_memory_bytes
from .run import OnProgress, run_confined
from .sandbox import Sandbox, find_sandbox

if TYPE_CHECKING:
    from ..settings import Settings

SandboxChoice = Literal["auto", "required", "off"]

_log = logging.getLogger(__name__)


class MeasuringFailed(StagewrightError):
    """The child succeeded, but its answer cannot be read: a bug of ours, not of the request."""


@dataclass(frozen=True)
class MeasuringSetup:
    """How a worker measures; plain values, so that it can be sent to one.

    Attributes:
        command: The measuring program.
        deadline_s: Longest a child may take.
        memory_bytes: Most it may keep; `None` for `default_memory_bytes` of the worker's machine.
        sandbox: Whether children get one: where there is one, always, or never.
    """

    command: tuple[str, ...]
    deadline_s: float
    memory_bytes: int | None = None
    sandbox: SandboxChoice = "auto"

    @classmethod
    def from_settings(cls, settings: Settings) -> MeasuringSetup:
        return cls(
            command=settings.measure_command,
            deadline_s=settings.measure_deadline_s,
            memory_bytes=settings.child_memory_bytes,
            sandbox=settings.sandbox,
        )

    def limits(self) -> Limits:
        return Limits(self.memory_bytes or default_memory_bytes(), self.deadline_s)


def measure_confined(
    request: MeasureRequest,
    setup: MeasuringSetup,
    *,
    on_progress: OnProgress | None = None,
    stopped: threading.Event | None = None,
) -> Profile:
    """The profile of what a request describes, measured in a child of this thread's.

    Args:
        request: What to measure.
        setup: How.
        on_progress: Called in this thread with ``done``, ``total``, ``layer``.
        stopped: Ends the child when set.

    Raises:
        Refused: A sandbox is required, and there is none.
        MeasuringFailed: What the child answered is no profile.
        StagewrightError: See `run.run_confined`.
    """
    output = run_confined(
        setup.command,
        request.model_dump_json().encode(),
        setup.limits(),
        sandbox=chosen_sandbox(setup.sandbox),
        on_progress=on_progress,
        stopped=stopped,
    )
    try:
        return Profile.model_validate_json(output)
    except ValidationError as error:
        raise MeasuringFailed(f"the child's profile does not fit: {error}") from None


def chosen_sandbox(choice: SandboxChoice) -> Sandbox | None:
    """What children are put into.

    Raises:
        Refused: One is required, and there is none.
    """
    if choice == "off":
        return None
    if choice == "required":
        return find_sandbox()
    return _sandbox_if_any()


@cache
def _sandbox_if_any() -> Sandbox | None:
    try:
        return find_sandbox()
    except Refused as error:  # said once, and in /v1/capabilities
        _log.warning("models are measured in capped children without a sandbox: %s", error)
        return None
