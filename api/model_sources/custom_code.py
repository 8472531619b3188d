"""Clients' models that this server runs: registered factories and, where allowed, code."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...core.requests.requests import MeasureRequest
from ..auth.principal import Principal
from ..http.problems import Problem
from ..settings.settings import ServerSettings
from .factories import Factories, check_call, read_factories
from .measure import CODE_IS_OFF


@dataclass(frozen=True)
class ForeignModels:
    """Models the operator lets this server run.

    Attributes:
        factories: Registered factories by name.
        allow_code: Whether clients may send code.
    """

    factories: Factories = field(default_factory=dict)
    allow_code: bool = False

    @classmethod
    def from_settings(cls, settings: ServerSettings) -> ForeignModels:
        """Read the registered factories. Raises: InvalidInput."""
        file = settings.factories_file
        return cls({} if file is None else read_factories(file), settings.allow_code)

    def check(self, principal: Principal, request: MeasureRequest) -> None:
        """Refuse what may not be run here, or not by this caller.

        Raises:
            InvalidInput: The factory is not registered, or its arguments do not fit.
            Problem: 403: code, which this server does not run, or which the caller may not send.
        """
        if request.code is not None:
            # The server's switch before the caller's right: where code is off, no right helps.
            if not self.allow_code:
                raise Problem(403, "code-not-allowed", CODE_IS_OFF)
            principal.require("code", "running code")
        if request.factory is not None:
            check_call(request.factory, self.factories)
