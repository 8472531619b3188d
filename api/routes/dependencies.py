"""Services that route handlers receive by dependency injection."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Request

from ..auth.authenticate import Authenticator
from ..jobs.service import JobService
from ..planning.service import Planning
from ..settings.settings import ServerSettings
from ..store.store import Store


def from_state(name: str) -> Any:
    """Return a dependency on the service of this name on ``app.state`` (see `app.create_app`)."""

    # A coroutine: FastAPI runs plain functions in its thread pool, which costs more than the call.
    async def read(request: Request) -> Any:
        return getattr(request.app.state, name)

    return Depends(read)


TheSettings = Annotated[ServerSettings, from_state("settings")]
TheStore = Annotated[Store, from_state("store")]
ThePlanning = Annotated[Planning, from_state("planning")]
TheJobs = Annotated[JobService, from_state("jobs")]
TheAuthenticator = Annotated[Authenticator, from_state("authenticator")]
