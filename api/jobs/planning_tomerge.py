"""What a job needs of whoever plans, as a contract."""

from __future__ import annotations

from typing import Protocol

from ...core.profile.profile import Profile
from ...core.service.plans import PlanRecord
from ..planning.requests import PlanRequest


class Plans(Protocol):
    """Plans from a profile that was measured."""

    async def from_profile(
        self, request: PlanRequest, profile: Profile, deadline_s: float
    ) -> PlanRecord:
        """The answer to a request, once its model is measured; stores nothing.

        Raises:
            StagewrightError: There is none.
        """
