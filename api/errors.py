"""Where nothing can be measured."""

from __future__ import annotations

from ..core.errors import StagewrightError


class MeasuringUnavailable(StagewrightError):
    """This server cannot measure, whatever the model."""
