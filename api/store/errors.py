"""What a store raises."""

from __future__ import annotations

from ...core import errors
from ...core.errors import InvalidInput, Refused, StagewrightError


class NotFound(errors.NotFound):
    """Nothing is stored under that id, in that project."""

    def __init__(self, kind: str, identifier: str) -> None:
        super().__init__(f"there is no {kind} {identifier[:80]!r}")


class StoreUnavailable(StagewrightError, ConnectionError):
    """The database does not answer; nothing was written. The same call may succeed later."""


class KeyReused(InvalidInput):
    """An idempotency key came back with another request."""

    def __init__(self, key: str) -> None:
        super().__init__(
            f"Idempotency-Key {key[:80]!r} was used for another request; choose a new one"
        )


class AnswerPending(StagewrightError):
    """The request with that idempotency key is being answered now; ask again a little later."""

    def __init__(self, key: str) -> None:
        super().__init__(
            f"the request with Idempotency-Key {key[:80]!r} is still being answered; "
            "ask again later"
        )


class TooManyJobs(Refused):
    """A limit on unfinished jobs is reached."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"{limit} jobs are unfinished, which is the limit; wait for one to end, or cancel one"
        )
