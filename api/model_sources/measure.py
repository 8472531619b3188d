"""Measurement of a client's model in a confined child, on a job's worker."""

from __future__ import annotations

import logging
import sys
import threading
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from ...core.errors import InvalidInput, MeasurementError, Refused, StagewrightError
from ...core.profile.profile import Profile
from ...core.requests.requests import MeasureRequest
from ..sandbox.bubblewrap import Sandbox, find_sandbox
from ..sandbox.child import OnProgress, run_confined
from ..sandbox.limits import ChildLimits, default_memory_bytes
from ..sandbox.self_test import Cell, proven_cell
from .factories import Factories, check_call, read_factories

if TYPE_CHECKING:
    from ..settings.settings import ServerSettings

FOREIGN_COMMAND = (sys.executable, "-P", "-m", "stagewright.profiler.untrusted_worker")
"""Program that measures registered factories and clients' code."""

SandboxChoice = Literal["auto", "required", "off"]

_log = logging.getLogger(__name__)


CODE_IS_OFF = (
    "this server does not run clients' code; send a graph made by 'stagewright capture', or have "
    "the server started with --allow-code"
)


class MeasuringFailed(StagewrightError):
    """The child succeeded with an invalid answer: a bug of Stagewright, not of the request."""


@dataclass(frozen=True)
class MeasuringSetup:
    """Setup of a worker's measurements; plain values, so that it can be sent to the worker.

    Attributes:
        command: The measuring program.
        deadline_s: Time limit of a child.
        memory_bytes: Its memory limit; `None` for `default_memory_bytes` of the worker's machine.
        sandbox: Whether children are put into a sandbox: if there is one, always, or never.
        factories: Registered factories by name.
        allow_code: Whether clients' code is measured, which always takes a tested cell.
    """

    command: tuple[str, ...]
    deadline_s: float
    memory_bytes: int | None = None
    sandbox: SandboxChoice = "auto"
    factories: Factories = field(default_factory=dict)
    allow_code: bool = False

    @classmethod
    def from_settings(cls, settings: ServerSettings) -> MeasuringSetup:
        return cls(
            command=settings.measure_command,
            deadline_s=settings.measure_deadline_s,
            memory_bytes=settings.child_memory_bytes,
            sandbox=settings.sandbox,
            factories=read_factories(settings.factories_file) if settings.factories_file else {},
            allow_code=settings.allow_code,
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

    Args:
        request: The measurement.
        setup: Commands and limits.
        on_progress: Called in this thread with ``done``, ``total``, ``layer``.
        stopped: Ends the child when set.

    Raises:
        Refused: A sandbox is required, and there is none.
        MeasuringFailed: The child's answer is not a profile although no foreign code ran.
        StagewrightError: See `run_confined`.
    """
    command, cell = _command(request, setup)
    output = run_confined(
        command,
        request.model_dump_json().encode(),
        setup.limits(),
        sandbox=cell.sandbox,
        cgroups=cell.cgroups,
        on_progress=on_progress,
        stopped=stopped,
    )
    try:
        return Profile.model_validate_json(output)
    except ValidationError as error:
        # Foreign code can exit the child with status 0 at any moment.
        if request.code is not None or request.factory is not None:
            raise MeasurementError("the model ended its process before it was measured") from None
        raise MeasuringFailed(f"the child returned no valid profile: {error}") from None


def check_confinement(settings: ServerSettings) -> None:
    """Check that this machine can confine children as the settings require.

    Raises:
        Refused: It cannot; the message says which probe escaped, or what is missing.
    """
    if settings.allow_code:
        try:
            proven_cell()
        except Refused as error:
            raise Refused(f"clients' code cannot be run here (allow_code): {error}") from None
    if settings.sandbox == "required":
        find_sandbox()


def _command(request: MeasureRequest, setup: MeasuringSetup) -> tuple[tuple[str, ...], Cell]:
    """Return the program that measures a request, and its confinement.

    Raises:
        InvalidInput: The factory is not registered here, or code is not allowed.
    """
    if request.code is not None:
        if not setup.allow_code:
            raise InvalidInput(CODE_IS_OFF, field="/code")
        # Always in a tested cell, even where the setup says that children need no sandbox.
        return (*FOREIGN_COMMAND, "--code"), proven_cell()
    sandbox = choose_sandbox(setup.sandbox)
    if request.factory is None:
        return setup.command, Cell(sandbox, None)
    # Again after the server's check, because a worker measures by its own setup.
    check_call(request.factory, setup.factories)
    factory = setup.factories[request.factory.name]
    words = ["--factory", f"{request.factory.name}={factory.target}"]
    for path in factory.path:
        words += ["--path", path]
    if sandbox is not None:
        # Besides what every child sees, it needs the folders that the factory is imported from.
        sandbox = sandbox.with_paths(factory.path)
    return (*FOREIGN_COMMAND, *words), Cell(sandbox, None)


def choose_sandbox(choice: SandboxChoice) -> Sandbox | None:
    """Return the sandbox for children, if any.

    Raises:
        Refused: A sandbox is required, and there is none.
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
    except Refused as error:  # logged once; /v1/capabilities shows it too
        _log.warning("children have limits on memory and time, but no sandbox: %s", error)
        return None
