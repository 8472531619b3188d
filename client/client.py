"""The blocking and the asynchronous client, which perform the steps of the client's methods."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Concatenate, ParamSpec, Self, TypedDict, TypeVar

from ..core.service.jobs import JobEvent
from .job_events import EventStream
from .methods import jobs as of_jobs
from .methods import plans as of_plans
from .methods import resources as of_resources
from .sans_io import (
    GetRetryBudget,
    HttpReply,
    HttpRequest,
    OpenStream,
    ReadStream,
    RetryBudget,
    Send,
    Sleep,
    Step,
    Steps,
    TransportFailure,
    copy_signature,
)
from .settings import TIMEOUT_S, ClientSettings

try:
    import httpx2 as httpx2
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "the client needs httpx2; run: pip install -e '.[client]' (in the checkout)",
        name=error.name,
    ) from None

CONNECT_TIMEOUT_S = 10.0


class HttpOptions(TypedDict):
    """Options that `httpx2.Client` and `httpx2.AsyncClient` have in common."""

    base_url: str
    headers: dict[str, str]
    trust_env: bool
    follow_redirects: bool


def build_options(settings: ClientSettings) -> HttpOptions:
    """Return the constructor options of the httpx2 client."""
    # Redirects are not followed: the token would be sent to another host.
    return {
        "base_url": settings.url,
        "headers": settings.headers,
        "trust_env": settings.uses_proxies,
        "follow_redirects": False,
    }


def build_request(
    http: httpx2.Client | httpx2.AsyncClient, call: HttpRequest, timeout_s: float
) -> Any:
    """Convert a request to httpx2's form."""
    timeout = httpx2.Timeout(timeout_s, connect=min(CONNECT_TIMEOUT_S, timeout_s))
    return http.build_request(
        call.method,
        call.path,
        params=dict(call.params) or None,
        headers=dict(call.headers),
        content=call.body,
        timeout=timeout,
    )


def read_response(response: httpx2.Response, body: bytes) -> HttpReply:
    """Convert a response of httpx2."""
    headers = {name.lower(): value for name, value in response.headers.items()}
    return HttpReply(response.status_code, headers, body)


def read_error(error: httpx2.RequestError) -> TransportFailure:
    """Convert an error of httpx2, deciding whether the service may have seen the request."""
    # Only these errors are raised before the first byte is sent.
    never_left = httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.PoolTimeout
    return TransportFailure(
        str(error) or type(error).__name__,
        was_sent=not isinstance(error, never_left),
        is_timeout=isinstance(error, httpx2.TimeoutException),
    )


P = ParamSpec("P")
Result = TypeVar("Result")


class StepRunner:
    """Runner of one method call's steps; holds at most one open stream."""

    def __init__(self, http: httpx2.Client, budget: RetryBudget) -> None:
        self._http = http
        self._budget = budget
        self._stream: httpx2.Response | None = None
        self._text: Iterator[str] = iter(())

    def perform(self, step: Step) -> HttpReply | TransportFailure | RetryBudget | str | None:
        """Perform a step and return its outcome."""
        try:
            match step:
                case GetRetryBudget():
                    return self._budget
                case Sleep(time_s):
                    time.sleep(time_s)
                    return None
                case Send(call, timeout_s):
                    response = self._http.send(build_request(self._http, call, timeout_s))
                    return read_response(response, response.content)
                case OpenStream(call, timeout_s):
                    self.close()
                    return self._open(build_request(self._http, call, timeout_s))
                case ReadStream():
                    return next(self._text, "")
        except httpx2.RequestError as error:
            return read_error(error)

    def _open(self, request: httpx2.Request) -> HttpReply:
        response = self._stream = self._http.send(request, stream=True)
        if not response.is_success:  # an error document has an end: read it whole
            return read_response(response, response.read())
        self._text = filter(None, response.iter_text())
        return read_response(response, b"")

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream, self._text = None, iter(())


def make_blocking(steps: Callable[P, Steps[Result]]) -> Callable[Concatenate[Client, P], Result]:
    """Turn a generator of steps into a blocking method of `Client`."""

    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        return self._run(steps(*args, **kwargs))

    copy_signature(method, steps)
    return method


def make_iterator(
    steps: Callable[P, EventStream],
) -> Callable[Concatenate[Client, P], Iterator[JobEvent]]:
    """Turn a generator of steps and events into an iterator over the events."""

    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[JobEvent]:
        return self._iterate(steps(*args, **kwargs))

    copy_signature(method, steps)
    return method


class Client:
    """Blocking client of a Stagewright service.

    Use it in a ``with`` block, close it, or leave it to the garbage collector. Threads may share
    it. The rules for retries are in `client.retry`.

    Args:
        url: Base URL of the service; defaults to ``STAGEWRIGHT_SERVER``, then to this machine.
        token: The server's token or an API key; defaults to ``STAGEWRIGHT_TOKEN``.
        timeout_s: Time limit of one call, retries included; waiting for a job is not counted.
        on_wait: Called with a message when the service is unreachable and a call is retried.
        transport: Replaces the network in tests.

    Raises:
        InvalidInput: The URL or the time limit is invalid.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        on_wait: Callable[[str], None] | None = None,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        self.settings = ClientSettings.from_environment(url, token, timeout_s, on_wait=on_wait)
        self._http = httpx2.Client(transport=transport, **build_options(self.settings))
        # Client().plan(...) in one line never closes; without this, httpx2 warns of open sockets.
        self._closing = weakref.finalize(self, self._http.close)

    def close(self) -> None:
        """Close the connections."""
        self._closing()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.settings.url!r})"

    def _run(self, steps: Steps[Result]) -> Result:
        runner = StepRunner(self._http, self.settings.retry_budget)
        answer: Any = None  # all that a generator accepts before its first yield
        try:
            while True:
                answer = runner.perform(steps.send(answer))
        except StopIteration as end:
            result: Result = end.value
            return result
        finally:
            # Also after an exception or a cancelled task: no generator or stream is left open.
            steps.close()
            runner.close()

    def _iterate(self, stream: EventStream) -> Iterator[JobEvent]:
        runner = StepRunner(self._http, self.settings.retry_budget)
        answer: Any = None
        try:
            while True:
                found = stream.send(answer)
                answer = None
                if isinstance(found, JobEvent):
                    yield found
                else:
                    answer = runner.perform(found)
        except StopIteration:
            return
        finally:
            stream.close()
            runner.close()

    plan = make_blocking(of_plans.plan)
    get_plan = make_blocking(of_plans.get_plan)
    plans = make_blocking(of_plans.plans)
    label_plan = make_blocking(of_plans.label_plan)
    delete_plan = make_blocking(of_plans.delete_plan)
    schedule = make_blocking(of_plans.schedule)
    timeline = make_blocking(of_plans.timeline)
    export = make_blocking(of_plans.export)
    simulate = make_blocking(of_plans.simulate)
    compare = make_blocking(of_plans.compare)

    put_profile = make_blocking(of_resources.put_profile)
    get_profile = make_blocking(of_resources.get_profile)
    profiles = make_blocking(of_resources.profiles)
    delete_profile = make_blocking(of_resources.delete_profile)
    export_profile = make_blocking(of_resources.export_profile)
    put_graph = make_blocking(of_resources.put_graph)
    get_graph = make_blocking(of_resources.get_graph)
    graphs = make_blocking(of_resources.graphs)
    delete_graph = make_blocking(of_resources.delete_graph)

    profile_job = make_blocking(of_jobs.profile_job)
    job = make_blocking(of_jobs.job)
    jobs = make_blocking(of_jobs.jobs)
    cancel = make_blocking(of_jobs.cancel)
    wait = make_blocking(of_jobs.wait)
    events = make_iterator(of_jobs.events)

    capabilities = make_blocking(of_resources.capabilities)
    cluster = make_blocking(of_resources.cluster)

    projects = make_blocking(of_resources.projects)
    create_project = make_blocking(of_resources.create_project)
    keys = make_blocking(of_resources.keys)
    create_key = make_blocking(of_resources.create_key)
    revoke_key = make_blocking(of_resources.revoke_key)


class AsyncStepRunner:
    """Asynchronous runner of one method call's steps; holds at most one open stream."""

    def __init__(self, http: httpx2.AsyncClient, budget: RetryBudget) -> None:
        self._http = http
        self._budget = budget
        self._stream: httpx2.Response | None = None
        self._text: AsyncIterator[str] | None = None

    async def perform(self, step: Step) -> HttpReply | TransportFailure | RetryBudget | str | None:
        """Perform a step and return its outcome."""
        try:
            match step:
                case GetRetryBudget():
                    return self._budget
                case Sleep(time_s):
                    await asyncio.sleep(time_s)
                    return None
                case Send(call, timeout_s):
                    response = await self._http.send(build_request(self._http, call, timeout_s))
                    return read_response(response, response.content)
                case OpenStream(call, timeout_s):
                    await self.close()
                    return await self._open(build_request(self._http, call, timeout_s))
                case ReadStream():
                    return await self._read()
        except httpx2.RequestError as error:
            return read_error(error)

    async def _open(self, request: httpx2.Request) -> HttpReply:
        response = self._stream = await self._http.send(request, stream=True)
        if not response.is_success:  # an error document has an end: read it whole
            return read_response(response, await response.aread())
        self._text = response.aiter_text()
        return read_response(response, b"")

    async def _read(self) -> str:
        if self._text is not None:
            async for text in self._text:
                if text:
                    return text
        return ""

    async def close(self) -> None:
        if self._stream is not None:
            await self._stream.aclose()
        self._stream, self._text = None, None


def make_coroutine(
    steps: Callable[P, Steps[Result]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, Result]]:
    """Turn a generator of steps into a coroutine method of `AsyncClient`."""

    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        return await self._run(steps(*args, **kwargs))

    copy_signature(method, steps)
    return method


def make_async_iterator(
    steps: Callable[P, EventStream],
) -> Callable[Concatenate[AsyncClient, P], AsyncIterator[JobEvent]]:
    """Turn a generator of steps and events into an asynchronous iterator over the events."""

    def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[JobEvent]:
        return self._iterate(steps(*args, **kwargs))

    copy_signature(method, steps)
    return method


class AsyncClient:
    """Asynchronous client of a Stagewright service.

    Close it, or use it in an ``async with`` block. Tasks of one event loop may share it. Arguments,
    errors and retries are those of `Client`. Capturing a module and parsing a document block the
    loop.
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
        self.settings = ClientSettings.from_environment(url, token, timeout_s, on_wait=on_wait)
        self._http = httpx2.AsyncClient(transport=transport, **build_options(self.settings))

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncClient({self.settings.url!r})"

    async def _run(self, steps: Steps[Result]) -> Result:
        runner = AsyncStepRunner(self._http, self.settings.retry_budget)
        answer: Any = None  # all that a generator accepts before its first yield
        try:
            while True:
                answer = await runner.perform(steps.send(answer))
        except StopIteration as end:
            result: Result = end.value
            return result
        finally:
            # Also after an exception or a cancelled task: no generator or stream is left open.
            steps.close()
            await runner.close()

    async def _iterate(self, stream: EventStream) -> AsyncIterator[JobEvent]:
        runner = AsyncStepRunner(self._http, self.settings.retry_budget)
        answer: Any = None
        try:
            while True:
                found = stream.send(answer)
                answer = None
                if isinstance(found, JobEvent):
                    yield found
                else:
                    answer = await runner.perform(found)
        except StopIteration:
            return
        finally:
            stream.close()
            await runner.close()

    plan = make_coroutine(of_plans.plan)
    get_plan = make_coroutine(of_plans.get_plan)
    plans = make_coroutine(of_plans.plans)
    label_plan = make_coroutine(of_plans.label_plan)
    delete_plan = make_coroutine(of_plans.delete_plan)
    schedule = make_coroutine(of_plans.schedule)
    timeline = make_coroutine(of_plans.timeline)
    export = make_coroutine(of_plans.export)
    simulate = make_coroutine(of_plans.simulate)
    compare = make_coroutine(of_plans.compare)

    put_profile = make_coroutine(of_resources.put_profile)
    get_profile = make_coroutine(of_resources.get_profile)
    profiles = make_coroutine(of_resources.profiles)
    delete_profile = make_coroutine(of_resources.delete_profile)
    export_profile = make_coroutine(of_resources.export_profile)
    put_graph = make_coroutine(of_resources.put_graph)
    get_graph = make_coroutine(of_resources.get_graph)
    graphs = make_coroutine(of_resources.graphs)
    delete_graph = make_coroutine(of_resources.delete_graph)

    profile_job = make_coroutine(of_jobs.profile_job)
    job = make_coroutine(of_jobs.job)
    jobs = make_coroutine(of_jobs.jobs)
    cancel = make_coroutine(of_jobs.cancel)
    wait = make_coroutine(of_jobs.wait)
    events = make_async_iterator(of_jobs.events)

    capabilities = make_coroutine(of_resources.capabilities)
    cluster = make_coroutine(of_resources.cluster)

    projects = make_coroutine(of_resources.projects)
    create_project = make_coroutine(of_resources.create_project)
    keys = make_coroutine(of_resources.keys)
    create_key = make_coroutine(of_resources.create_key)
    revoke_key = make_coroutine(of_resources.revoke_key)
