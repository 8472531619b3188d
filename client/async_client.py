"""`AsyncClient`: steps carried out while the event loop does other things."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from ..core.service.jobs import JobEvent
from .job_events import Stream
from .methods import catalogue as of_catalogue
from .methods import documents as of_documents
from .methods import jobs as of_jobs
from .methods import keys as of_keys
from .methods import plans as of_plans
from .sans_io import (
    AskPatience,
    Failure,
    Hear,
    Listen,
    Patience,
    Reply,
    Send,
    Sleep,
    Step,
    Steps,
    as_method,
)
from .settings import TIMEOUT_S, Settings
from .transport import failure_of, http_options, httpx2, reply_of, request_of

P = ParamSpec("P")
Result = TypeVar("Result")


class Line:
    """Carries out steps; has at most one stream open. Close it."""

    def __init__(self, http: httpx2.AsyncClient, patience: Patience) -> None:
        self._http = http
        self._patience = patience
        self._stream: httpx2.Response | None = None
        self._text: AsyncIterator[str] | None = None

    async def perform(self, step: Step) -> Reply | Failure | Patience | str | None:
        """The answer to a step."""
        try:
            match step:
                case AskPatience():
                    return self._patience
                case Sleep(time_s):
                    await asyncio.sleep(time_s)
                    return None
                case Send(call, timeout_s):
                    response = await self._http.send(request_of(self._http, call, timeout_s))
                    return reply_of(response, response.content)
                case Listen(call, timeout_s):
                    await self.close()
                    return await self._open(request_of(self._http, call, timeout_s))
                case Hear():
                    return await self._heard()
        except httpx2.RequestError as error:
            return failure_of(error)

    async def _open(self, request: httpx2.Request) -> Reply:
        response = self._stream = await self._http.send(request, stream=True)
        if not response.is_success:
            return reply_of(response, await response.aread())
        self._text = response.aiter_text()
        return reply_of(response, b"")

    async def _heard(self) -> str:
        if self._text is not None:
            async for text in self._text:
                if text:
                    return text
        return ""

    async def close(self) -> None:
        if self._stream is not None:
            await self._stream.aclose()
        self._stream, self._text = None, None


def awaiting(
    steps: Callable[P, Steps[Result]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, Result]]:
    """A method of `AsyncClient` out of steps."""

    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        return await self._run(steps(*args, **kwargs))

    as_method(method, steps)
    return method


def streaming(
    steps: Callable[P, Stream],
) -> Callable[Concatenate[AsyncClient, P], AsyncIterator[JobEvent]]:
    """A method of `AsyncClient` that gives events, out of steps with events between them."""

    def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[JobEvent]:
        return self._iterate(steps(*args, **kwargs))

    as_method(method, steps)
    return method


class AsyncClient:
    """Asks a Stagewright service. Close it, or use it in an ``async with`` block.

    Several tasks may use it, of one event loop. What it sends again, when and why is in `retrying`.
    A module is captured, and a document read, on the event loop: that takes its time.

    Args:
        url: Where the service is; ``STAGEWRIGHT_SERVER`` if not given, then this machine.
        token: The server's token or an API key; ``STAGEWRIGHT_TOKEN`` if not given.
        timeout_s: For one answer, with every attempt at it. Waiting for a job has a time of its
            own.
        on_wait: Told, in words, when the service does not answer and is waited for.
        transport: What carries requests, for tests.

    Raises:
        InvalidInput: The address is none.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        on_wait: Callable[[str], None] | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        self.settings = Settings.of(url, token, timeout_s, on_wait=on_wait)
        self._http = httpx2.AsyncClient(transport=transport, **http_options(self.settings))

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncClient({self.settings.url!r})"

    async def _run(self, steps: Steps[Result]) -> Result:
        line = Line(self._http, self.settings.patience)
        answer: Any = None
        try:
            while True:
                answer = await line.perform(steps.send(answer))
        except StopIteration as end:
            result: Result = end.value
            return result
        finally:
            steps.close()
            await line.close()

    async def _iterate(self, stream: Stream) -> AsyncIterator[JobEvent]:
        line = Line(self._http, self.settings.patience)
        answer: Any = None
        try:
            while True:
                found = stream.send(answer)
                answer = None
                if isinstance(found, JobEvent):
                    yield found
                else:
                    answer = await line.perform(found)
        except StopIteration:
            return
        finally:
            stream.close()
            await line.close()

    plan = awaiting(of_plans.plan)
    get_plan = awaiting(of_plans.get_plan)
    plans = awaiting(of_plans.plans)
    schedule = awaiting(of_plans.schedule)
    timeline = awaiting(of_plans.timeline)
    export = awaiting(of_plans.export)
    simulate = awaiting(of_plans.simulate)
    compare = awaiting(of_plans.compare)

    put_profile = awaiting(of_documents.put_profile)
    get_profile = awaiting(of_documents.get_profile)
    profiles = awaiting(of_documents.profiles)
    export_profile = awaiting(of_documents.export_profile)
    put_graph = awaiting(of_documents.put_graph)
    get_graph = awaiting(of_documents.get_graph)
    graphs = awaiting(of_documents.graphs)
    upload_pt2 = awaiting(of_documents.upload_pt2)

    profile_job = awaiting(of_jobs.profile_job)
    job = awaiting(of_jobs.job)
    jobs = awaiting(of_jobs.jobs)
    cancel = awaiting(of_jobs.cancel)
    wait = awaiting(of_jobs.wait)
    events = streaming(of_jobs.events)

    capabilities = awaiting(of_catalogue.capabilities)
    accelerators = awaiting(of_catalogue.accelerators)
    model_families = awaiting(of_catalogue.model_families)
    model_family = awaiting(of_catalogue.model_family)
    cluster = awaiting(of_catalogue.cluster)

    keys = awaiting(of_keys.keys)
    create_key = awaiting(of_keys.create_key)
    revoke_key = awaiting(of_keys.revoke_key)
