"""Errors that the service's own parts raise; `http.problems` gives each its HTTP status."""

from __future__ import annotations

from ..core.errors import StagewrightError


class MeasuringUnavailable(StagewrightError):
    """This server cannot measure, whatever the model."""


class SolverEnded(StagewrightError):
    """A planning process was killed from outside, most likely for lack of memory."""


class WorkersUnavailable(StagewrightError):
    """The backend that runs jobs cannot be reached or started; a retry may succeed."""
