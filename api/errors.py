"""Errors of the service's own parts; `http.problems` gives each its HTTP status and headers.

::

    StagewrightError
    ├── AccessDenied
    │   ├── Unauthorized
    │   ├── Forbidden
    │   ├── MissingOrigin
    │   ├── TooManyWrongTokens
    │   └── IdentityProviderUnreachable
    ├── JobUnreadable
    ├── MeasuringUnavailable (a core.errors.Refused)
    ├── NoPlan
    ├── RequestDeadlineExceeded (a core.errors.DeadlineExceeded)
    ├── SolverEnded
    ├── TooManyWaiting
    ├── WorkerGaveOut
    └── WorkersUnavailable
"""

from __future__ import annotations

from ..core.errors import DeadlineExceeded, Refused, StagewrightError


class AccessDenied(StagewrightError):
    """A request was refused because of its sender."""


class Unauthorized(AccessDenied):
    """A request carries no valid credentials.

    Args:
        message: The reason and the way out.
        is_invalid_token: True if a token was sent; the challenge then says so (RFC 6750, 3.1).
    """

    is_invalid_token: bool

    def __init__(self, message: str, *, is_invalid_token: bool = False) -> None:
        super().__init__(message)
        self.is_invalid_token = is_invalid_token


class Forbidden(AccessDenied):
    """A known principal lacks the right to do what it asks for.

    Args:
        message: The reason and the way out.
        scope: The scope that is missing, if that is the reason.
    """

    scope: str | None

    def __init__(self, message: str, *, scope: str | None = None) -> None:
        super().__init__(message)
        self.scope = scope


class MissingOrigin(AccessDenied):
    """A browser's request does not name the page that it comes from."""

    def __init__(self) -> None:
        super().__init__(
            "Requests with a session cookie need the Origin header to change anything. Programs "
            "send 'Authorization: Bearer <token>' instead of a cookie."
        )


class TooManyWrongTokens(AccessDenied):
    """An address has sent too many wrong tokens and has to wait."""

    retry_after_s: int

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(
            f"Too many wrong tokens from this address. Retry in {retry_after_s} s, or use an API "
            "key, which is accepted meanwhile."
        )
        self.retry_after_s = retry_after_s


class IdentityProviderUnreachable(AccessDenied):
    """The identity provider's signing keys can neither be fetched nor taken from the cache."""

    retry_after_s: int

    def __init__(self, retry_after_s: int) -> None:
        super().__init__("The identity provider's keys cannot be fetched. Retry a little later.")
        self.retry_after_s = retry_after_s


class MeasuringUnavailable(Refused):
    """This server cannot measure, whatever the model."""


class NoPlan(StagewrightError):
    """A stored request is infeasible, so it has no plan to show."""


class RequestDeadlineExceeded(DeadlineExceeded):
    """No plan was found within the deadline that the request itself set."""

    field = "/deadline_s"


class JobUnreadable(StagewrightError):
    """Another release wrote the job's request, and this one cannot read it."""


class WorkerGaveOut(StagewrightError):
    """Every attempt at a job lost its worker."""


class SolverEnded(StagewrightError):
    """A planning process ended before its work did; the message says how."""


class TooManyWaiting(StagewrightError):
    """A project has asked for as much at once as it may."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"{limit} drawings, exports and simulations of this project are under way, which is "
            "the limit; ask again later"
        )


class WorkersUnavailable(StagewrightError):
    """The backend that runs jobs cannot be reached or started; a retry may succeed."""
