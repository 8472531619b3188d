"""Errors raised by the store."""

from __future__ import annotations

from ...core import errors
from ...core.errors import InvalidInput, Refused, StagewrightError
from ...core.units import format_bytes


class RecordNotFound(errors.NotFound):
    """The project has nothing stored under that id."""

    def __init__(self, kind: str, identifier: str) -> None:
        super().__init__(f"there is no {kind} {identifier[:80]!r}")


class StoreUnavailable(StagewrightError, ConnectionError):
    """The database does not answer and nothing was written; a retry may succeed."""


class ProfileInUse(Refused):
    """Plans name the profile, so it cannot be deleted."""

    def __init__(self, profile_id: str, num_plans: int, plan_id: str) -> None:
        super().__init__(
            f"{profile_id} is the profile of {num_plans} plan{'s' * (num_plans > 1)}, such as "
            f"{plan_id}; delete the plans first"
        )


class KeyReused(InvalidInput):
    """An idempotency key was reused for another request."""

    def __init__(self, key: str) -> None:
        super().__init__(
            f"Idempotency-Key {key[:80]!r} was used for another request; choose a new key"
        )


class AnswerPending(StagewrightError):
    """Another request with the same idempotency key is being answered."""

    def __init__(self, key: str) -> None:
        super().__init__(
            f"the request with Idempotency-Key {key[:80]!r} is still being answered; "
            "ask again later"
        )


class TooManyJobs(Refused):
    """The limit on unfinished jobs of a key or a project is reached."""

    def __init__(self, limit: int, owner: str = "key") -> None:
        super().__init__(
            f"the limit of {limit} unfinished jobs of this {owner} is reached; wait for one to "
            "end, or cancel one"
        )


class StorageFull(Refused):
    """A project has reached the size that the server allows."""

    def __init__(self, size: int, limit: int, stored: int) -> None:
        super().__init__(
            f"these {format_bytes(size)} do not fit beside the "
            f"{format_bytes(stored)} that this project stores, of {format_bytes(limit)} allowed; "
            "delete plans, profiles or graphs, wait until the answers kept for each "
            "Idempotency-Key expire after a day, or have the operator raise project_stored_bytes"
        )
