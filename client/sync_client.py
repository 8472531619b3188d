"""`Client`: steps carried out one after the other, in the thread that asks."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
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

    def __init__(self, http: httpx2.Client, patience: Patience) -> None:
        self._http = http
        self._patience = patience
        self._stream: httpx2.Response | None = None
        self._text: Iterator[str] = iter(())

    def perform(self, step: Step) -> Reply | Failure | Patience | str | None:
        """The answer to a step."""
        try:
            match step:
                case AskPatience():
                    return self._patience
                case Sleep(time_s):
                    time.sleep(time_s)
                    return None
                case Send(call, timeout_s):
                    response = self._http.send(request_of(self._http, call, timeout_s))
                    return reply_of(response, response.content)
                case Listen(call, timeout_s):
                    self.close()
                    return self._open(request_of(self._http, call, timeout_s))
                case Hear():
                    return next(self._text, "")
        except httpx2.RequestError as error:
            return failure_of(error)

    def _open(self, request: httpx2.Request) -> Reply:
        response = self._stream = self._http.send(request, stream=True)
        if not response.is_success:
            return reply_of(response, response.read())
        self._text = filter(None, response.iter_text())
        return reply_of(response, b"")

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream, self._text = None, iter(())


def blocking(steps: Callable[P, Steps[Result]]) -> Callable[Concatenate[Client, P], Result]:
    """A method of `Client` out of steps."""

    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        return self._run(steps(*args, **kwargs))

    as_method(method, steps)
    return method


def streaming(
    steps: Callable[P, Stream],
) -> Callable[Concatenate[Client, P], Iterator[JobEvent]]:
    """A method of `Client` that gives events, out of steps with events between them."""

    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[JobEvent]:
        return self._iterate(steps(*args, **kwargs))

    as_method(method, steps)
    return method


class Client:
    """Asks a Stagewright service. Close it, or use it in a ``with`` block, or let it go.

    It may be used by several threads. What it sends again, when and why is in `retrying`.

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
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        self.settings = Settings.of(url, token, timeout_s, on_wait=on_wait)
        self._http = httpx2.Client(transport=transport, **http_options(self.settings))
        self._closing = weakref.finalize(self, self._http.close)  # Client().plan(...) in one line

    def close(self) -> None:
        """Close its connections."""
        self._closing()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self.settings.url!r})"

    def _run(self, steps: Steps[Result]) -> Result:
        line = Line(self._http, self.settings.patience)
        answer: Any = None
        try:
            while True:
                answer = line.perform(steps.send(answer))
        except StopIteration as end:
            result: Result = end.value
            return result
        finally:
            steps.close()
            line.close()

    def _iterate(self, stream: Stream) -> Iterator[JobEvent]:
        line = Line(self._http, self.settings.patience)
        answer: Any = None
        try:
            while True:
                found = stream.send(answer)
                answer = None
                if isinstance(found, JobEvent):
                    yield found
                else:
                    answer = line.perform(found)
        except StopIteration:
            return
        finally:
            stream.close()
            line.close()

    plan = blocking(of_plans.plan)
    get_plan = blocking(of_plans.get_plan)
    plans = blocking(of_plans.plans)
    schedule = blocking(of_plans.schedule)
    timeline = blocking(of_plans.timeline)
    export = blocking(of_plans.export)
    simulate = blocking(of_plans.simulate)
    compare = blocking(of_plans.compare)

    put_profile = blocking(of_documents.put_profile)
    get_profile = blocking(of_documents.get_profile)
    profiles = blocking(of_documents.profiles)
    export_profile = blocking(of_documents.export_profile)
    put_graph = blocking(of_documents.put_graph)
    get_graph = blocking(of_documents.get_graph)
    graphs = blocking(of_documents.graphs)
    upload_pt2 = blocking(of_documents.upload_pt2)

    profile_job = blocking(of_jobs.profile_job)
    job = blocking(of_jobs.job)
    jobs = blocking(of_jobs.jobs)
    cancel = blocking(of_jobs.cancel)
    wait = blocking(of_jobs.wait)
    events = streaming(of_jobs.events)

    capabilities = blocking(of_catalogue.capabilities)
    accelerators = blocking(of_catalogue.accelerators)
    model_families = blocking(of_catalogue.model_families)
    model_family = blocking(of_catalogue.model_family)
    cluster = blocking(of_catalogue.cluster)

    keys = blocking(of_keys.keys)
    create_key = blocking(of_keys.create_key)
    revoke_key = blocking(of_keys.revoke_key)
