"""What the service does, free of HTTP: measure if asked, plan, keep both."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from math import isfinite

from starlette.concurrency import run_in_threadpool

from ..core.cluster import Cluster
from ..core.errors import Infeasible, InvalidInput
from ..core.plan import PlanOptions
from ..core.profile import Profile
from ..planner.plan import plan
from .auth.caller import Caller
from .effort import check_effort
from .measuring import Measurer
from .records import InfeasibleAnswer, PlanRecord, StoredPlan, WayOutAnswer
from .requests import PlanRequest
from .store.contract import Store
from .store.errors import NotFound
from .store.records import Stored

MAX_CONCURRENT_PLANS = 2
"""More would only slow each other down, and keep threads from the requests that read."""


class Planning:
    """Answers planning requests.

    Args:
        store: Where profiles and answers are kept.
        measurer: What measures a model that comes without a profile.
        deadline_s: Longest one request may search for a plan.
    """

    def __init__(self, store: Store, measurer: Measurer, *, deadline_s: float) -> None:
        self._store = store
        self._measurer = measurer
        self._deadline_s = deadline_s
        self._planning_turns = asyncio.Semaphore(MAX_CONCURRENT_PLANS)

    async def create_plan(self, caller: Caller, request: PlanRequest) -> StoredPlan:
        """Plan, and keep the request with its answer; infeasible is an answer.

        Planning and storing run in worker threads: the event loop stays free.

        Raises:
            InvalidInput: The request makes no sense together, asks for more than this service
                does, or for more time than it gives.
            DeadlineExceeded: No plan was found in time, and none was proven impossible.
            Problem: 403: it asks for a measurement, which the caller may not.
            StagewrightError: Measuring failed (see `Measurer.measure`).
        """
        deadline_s = self._deadline(request)
        profiles = await self._profiles(caller, request)
        check_effort(profiles, request.cluster, request.options)
        async with self._planning_turns:
            record = await run_in_threadpool(
                decide, profiles, request.cluster, request.options, deadline_s
            )
        return await run_in_threadpool(self._store.documents.put_plan, caller.project_id, record)

    async def create_profile(self, project_id: str, profile: Profile) -> Stored:
        """Keep a profile."""
        return await run_in_threadpool(self._store.documents.put_profile, project_id, profile)

    def _deadline(self, request: PlanRequest) -> float:
        if request.deadline_s is None:
            return self._deadline_s
        if request.deadline_s > self._deadline_s:
            raise InvalidInput(
                f"this server searches for at most {self._deadline_s:g} s, not "
                f"{request.deadline_s:g} s; ask for less, or plan with the library",
                field="/deadline_s",
            )
        return request.deadline_s

    async def _profiles(self, caller: Caller, request: PlanRequest) -> tuple[Profile, ...]:
        """The profiles to plan from, stored."""
        if request.profile_id is not None:
            try:
                found = await run_in_threadpool(
                    self._store.documents.profile, caller.project_id, request.profile_id
                )
            except NotFound as error:
                raise InvalidInput(str(error), field="/profile_id") from None
            return (found.profile,)
        measure_request = request.measure_request()
        if measure_request is not None:
            caller.require("measure", "measuring a model")
            profiles: tuple[Profile, ...] = (await self._measurer.measure(measure_request),)
        elif request.profiles is not None:
            profiles = request.profiles
        else:
            assert request.profile is not None, "PlanRequest has exactly one source"
            profiles = (request.profile,)
        for profile in profiles:
            await self.create_profile(caller.project_id, profile)
        return profiles


def decide(
    profiles: Sequence[Profile], cluster: Cluster, options: PlanOptions, deadline_s: float
) -> PlanRecord:
    """Plan, with infeasibility as an answer.

    The answer names the profile it is of; where nothing fits, the first.

    Raises:
        InvalidInput: The planner refuses the request.
        DeadlineExceeded: No plan was found in time, and none was proven impossible.
    """
    try:
        answer = plan(profiles, cluster, options, deadline_s=deadline_s)
    except Infeasible as error:
        return PlanRecord(
            status="infeasible",
            profile_id=profiles[0].content_id(),
            cluster=cluster,
            options=options,
            infeasible=InfeasibleAnswer(
                constraint=error.constraint,
                required=_number(error.required),
                available=_number(error.available),
                message=str(error),
                ways_out=tuple(
                    WayOutAnswer(
                        text=way_out.text,
                        num_devices=len(way_out.cluster.devices),
                        options=way_out.options,
                        step_time_s=way_out.step_time_s,
                    )
                    for way_out in error.ways_out
                ),
            ),
        )
    return PlanRecord(
        status="planned",
        profile_id=answer.profile_id,
        cluster=cluster,
        options=options,
        plan=answer,
    )


def _number(value: float | None) -> float | None:
    """JSON has no infinity."""
    return value if value is not None and isfinite(value) else None
