"""Measuring what was sent, in a child; a job calls this on its worker."""

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
"""Measures models of others: registered ones, and code where it is allowed."""

SandboxChoice = Literal["auto", "required", "off"]

_log = logging.getLogger(__name__)


CODE_IS_OFF = (
    "this server runs no code it is sent; send a graph that 'stagewright capture' writes, or have "
    "the server started with --allow-code"
)


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
        factories: What is registered.
        allow_code: Whether code is measured, which takes a cell that holds, whatever ``sandbox``.
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
    """The profile of what a request describes, measured in a child of this thread's.

    Args:
        request: What to measure.
        setup: How.
        on_progress: Called in this thread with ``done``, ``total``, ``layer``.
        stopped: Ends the child when set.

    Raises:
        Refused: A sandbox is required, and there is none.
        MeasuringFailed: What the child answered is no profile, and the model is not to blame.
        StagewrightError: See `run.run_confined`.
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
        if request.code is not None or request.factory is not None:
            raise MeasurementError("the model ended its process before it was measured") from None
        raise MeasuringFailed(f"the child's profile does not fit: {error}") from None


def prove(settings: ServerSettings) -> None:
    """Find out whether what the settings ask of sandboxes is to be had on this machine.

    Raises:
        Refused: It is not; the message says which probe got out, or what is missing.
    """
    if settings.allow_code:
        try:
            proven_cell()
        except Refused as error:
            raise Refused(f"code is not run here (allow_code): {error}") from None
    if settings.sandbox == "required":
        find_sandbox()


def _command(request: MeasureRequest, setup: MeasuringSetup) -> tuple[tuple[str, ...], Cell]:
    """The program that measures a request, and what it is put into.

    Raises:
        InvalidInput: The factory is not registered here, or code is not allowed.
    """
    if request.code is not None:
        if not setup.allow_code:
            raise InvalidInput(CODE_IS_OFF, field="/code")
        return (*FOREIGN_COMMAND, "--code"), proven_cell()
    sandbox = choose_sandbox(setup.sandbox)
    if request.factory is None:
        return setup.command, Cell(sandbox, None)
    check_call(request.factory, setup.factories)
    factory = setup.factories[request.factory.name]
    words = ["--factory", f"{request.factory.name}={factory.target}"]
    for path in factory.path:
        words += ["--path", path]
    if sandbox is not None:
        sandbox = sandbox.with_paths(factory.path)
    return (*FOREIGN_COMMAND, *words), Cell(sandbox, None)


def choose_sandbox(choice: SandboxChoice) -> Sandbox | None:
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
