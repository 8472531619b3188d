"""What persists, as a contract; `store_sqlite` is the one backend so far."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ..core.errors import StagewrightError
from ..core.profile import Profile
from .records import PlanRecord, PlanSummary, Stored, StoredPlan, StoredProfile


class NotFound(StagewrightError):
    """Nothing is stored under that id."""

    def __init__(self, kind: str, identifier: str) -> None:
        super().__init__(f"there is no {kind} {identifier[:80]!r}")


class Store(ABC):
    """Keeps profiles and plan records for ever, each under the id its content has.

    - Stored values never change. Storing equal content again returns the first row, its
      ``created_at`` included, and adds none.
    - A write has happened when the method returns, and is visible to every later read, of other
      threads and of other processes alike. It happens whole or not at all.
    - Every method may be called from several threads at once. Each may block: never call one
      on an event loop.
    - What is read equals what was written.
    """

    @abstractmethod
    def put_profile(self, profile: Profile) -> Stored:
        """Store a profile under its ``content_id()``."""

    @abstractmethod
    def profile(self, profile_id: str) -> StoredProfile:
        """The profile of that id.

        Raises:
            NotFound: There is none.
        """

    @abstractmethod
    def put_plan(self, record: PlanRecord) -> StoredPlan:
        """Store a plan record under its ``record_id()``.

        Raises:
            NotFound: Its profile is not stored.
        """

    @abstractmethod
    def plan(self, plan_id: str) -> StoredPlan:
        """The plan record of that id.

        Raises:
            NotFound: There is none.
        """

    @abstractmethod
    def plans(self, *, limit: int) -> list[PlanSummary]:
        """The last ``limit`` plan records stored, newest first."""

    @abstractmethod
    def check(self) -> None:
        """Return if the store answers; raise any exception if it does not."""

    @abstractmethod
    def close(self) -> None:
        """Release files and connections. Nothing may be called afterwards; closing twice may."""
