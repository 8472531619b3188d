"""Measurement of a client's model in a confined child, on a job's worker."""

from __future__ import annotations

import logging
import sys
import threading
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from ...core.errors import MeasurementError, Refused
from ...core.profile.profile import Profile
from ...core.requests.requests import MeasureRequest
from ..sandbox.bubblewrap import Sandbox, find_sandbox
from ..sandbox.child import OnProgress, run_confined
from ..sandbox.limits import ChildLimits, default_memory_bytes
from .factories import Factories, check_call, read_factories

if TYPE_CHECKING:
    from ..settings.settings import ServerSettings

FACTORY_COMMAND = (sys.executable, "-P", "-m", "stagewright.profiler.factory_worker")
"""Program that measures what registered factories make."""

SandboxChoice = Literal["auto", "required", "off"]

_log = logging.getLogger(__name__)


def invalid_answer(what: str, error: ValueError) -> MeasurementError:
    """Return the error for a child that succeeded with an invalid answer.

    The log gets the kinds of errors alone: their messages quote what the client sent.
    """
    found = error.errors(include_input=False) if isinstance(error, ValidationError) else []
    kinds = sorted({item["type"] for item in found}) or ["no JSON"]
    _log.error("a child returned no valid %s: %s", what, ", ".join(kinds))
    return MeasurementError(
        f"the child process returned no valid {what}; the model contradicts itself, or this is a "
        "bug: capture it again, or profile it where it is, and send the profile"
    )


@dataclass(frozen=True)
class MeasuringSetup:
    """Setup of a worker's measurements; plain values, so that it can be sent to the worker.

    Attributes:
        command: The measuring program.
        deadline_s: Time limit of a child.
        memory_bytes: Its memory limit; `None` for `default_memory_bytes` of the worker's machine.
        sandbox: Whether children are put into a sandbox: if there is one, always, or never.
        factories: Registered factories by name.
    """

    command: tuple[str, ...]
    deadline_s: float
    memory_bytes: int | None = None
    sandbox: SandboxChoice = "auto"
    factories: Factories = field(default_factory=dict)

    @classmethod
    def from_settings(cls, settings: ServerSettings) -> MeasuringSetup:
        return cls(
            command=settings.measure_command,
            deadline_s=settings.measure_deadline_s,
            memory_bytes=settings.child_memory_bytes,
            sandbox=settings.sandbox,
            factories=read_factories(settings.factories_file),
        )

    def limits(self) -> ChildLimits:
        return ChildLimits(self.memory_bytes or default_memory_bytes(), self.deadline_s)


def measure_confined(
    request: MeasureRequest,
    setup: MeasuringSetup,
    *,
    on_progress: OnProgress | None = None,
    stopped: threading.Event | None = None,
) -> Profile:
    """Measure a model in a child of this thread and return its profile.

    Raises:
        Refused: A sandbox is required, and there is none.
        StagewrightError: See `run_confined`.
    """
    command, sandbox = _command(request, setup)
    output = run_confined(
        command,
        request.model_dump_json().encode(),
        setup.limits(),
        sandbox=sandbox,
        on_progress=on_progress,
        stopped=stopped,
    )
    try:
        return Profile.model_validate_json(output)
    except ValidationError as error:
        # A factory can exit the child with status 0 at any moment.
        if request.factory is not None:
            raise MeasurementError("the model ended its process before it was measured") from None
        raise invalid_answer("profile", error) from None


def _command(
    request: MeasureRequest, setup: MeasuringSetup
) -> tuple[tuple[str, ...], Sandbox | None]:
    """Return the program that measures a request, and its sandbox."""
    sandbox = choose_sandbox(setup.sandbox)
    if request.factory is None:
        return setup.command, sandbox
    # Again after the server's check, because a worker measures by its own setup.
    check_call(request.factory, setup.factories)
    factory = setup.factories[request.factory.name]
    words = ["--factory", f"{request.factory.name}={factory.target}"]
    for path in factory.path:
        words += ["--path", path]
    if sandbox is not None:
        # Besides what every child sees, it needs the folders that the factory is imported from.
        sandbox = sandbox.with_paths(factory.path)
    return (*FACTORY_COMMAND, *words), sandbox


def choose_sandbox(choice: SandboxChoice) -> Sandbox | None:
    """Return the sandbox for children, if any; raise `Refused` if it is required and missing."""
    if choice == "off":
        return None
    if choice == "required":
        return find_sandbox()
    return _sandbox_if_any()


@cache
def _sandbox_if_any() -> Sandbox | None:
    try:
        return find_sandbox()
    except Refused as error:  # logged once; /v1/capabilities shows it too
        _log.warning("children have limits on memory and time, but no sandbox: %s", error)
        return None
