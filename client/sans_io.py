"""Client methods as generators that request I/O and perform none (the sans-IO pattern)."""

# One implementation serves both clients. A method in `methods/` is a generator: it yields a `Step`
# (send a request, sleep, read from a stream), receives the outcome of that step from `send`, and
# returns its result. It never touches a socket or a clock. `Client` performs the steps one after
# the other in the calling thread; `AsyncClient` awaits them on the event loop; the tests replay
# scripted outcomes with a fake clock. Retries and reconnection are therefore written, and tested,
# once. A step that fails is not raised into the generator: the outcome is a `TransportFailure`, so
# that `retry` decides in one place whether the request may be sent again.

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from functools import update_wrapper
from typing import Any, TypeAlias, TypeVar

from pydantic import BaseModel, ValidationError

from ..core.errors import StagewrightError

Model = TypeVar("Model", bound=BaseModel)
Result = TypeVar("Result")


@dataclass(frozen=True)
class HttpRequest:
    """An HTTP request; repeatable if sending it twice has the same effect as sending it once."""

    method: str
    path: str
    params: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    is_repeatable: bool = True

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass(frozen=True)
class HttpReply:
    """An HTTP response of any status; header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    def read(self, model: type[Model]) -> Model:
        """Parse the body, ignoring fields that a later release added."""
        try:
            return model.model_validate_json(self.body, extra="ignore")
        except ValidationError as error:
            raise StagewrightError(
                f"the service answered {self.status} with a body that is not a valid "
                f"{model.__name__}; is it of another release than this client? {error}"
            ) from None


@dataclass(frozen=True)
class TransportFailure:
    """A request without a complete response; the service may have received it if ``was_sent``."""

    reason: str
    was_sent: bool = True
    is_timeout: bool = False


@dataclass(frozen=True)
class Send:
    """Step that sends a request; its outcome is an `HttpReply` or a `TransportFailure`."""

    call: HttpRequest
    timeout_s: float


@dataclass(frozen=True)
class OpenStream:
    """Step that sends a request and, if it succeeds, leaves the response body to `ReadStream`.

    Its outcome is an `HttpReply` (without a body while the stream is open) or a
    `TransportFailure`.
    """

    call: HttpRequest
    timeout_s: float


@dataclass(frozen=True)
class ReadStream:
    """Step that reads text from the open stream: ``""`` at its end, or a `TransportFailure`."""


@dataclass(frozen=True)
class Sleep:
    """Step that waits."""

    time_s: float


FIRST_DELAY_S = 0.25
LONGEST_DELAY_S = 8.0


@dataclass(frozen=True)
class RetryBudget:
    """Time limit of one call, covering all its attempts and the pauses between them.

    ``jitter`` returns a number in [0, 1) and spreads the retries of clients that failed together.
    ``on_wait`` is called with a message, once per call, when the service is unreachable.
    """

    timeout_s: float
    clock: Callable[[], float]
    jitter: Callable[[], float] = random.random
    address: str = ""
    on_wait: Callable[[str], None] | None = None

    def delay_s(self, attempt: int) -> float:
        """Return the pause after an attempt: exponential backoff with up to 50 % jitter."""
        longest: float = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** min(attempt - 1, 10))
        return longest * (0.5 + 0.5 * self.jitter())


@dataclass(frozen=True)
class GetRetryBudget:
    """Step whose outcome is the client's `RetryBudget`."""


Step: TypeAlias = Send | OpenStream | ReadStream | Sleep | GetRetryBudget
Steps: TypeAlias = Generator[Step, Any, Result]
"""A client method: yields steps, receives their outcomes, returns a result."""


# A `yield` has the type Any. These helpers give each step's outcome its type.
def send(call: HttpRequest, timeout_s: float) -> Steps[HttpReply | TransportFailure]:
    answer: HttpReply | TransportFailure = yield Send(call, timeout_s)
    return answer


def open_stream(call: HttpRequest, timeout_s: float) -> Steps[HttpReply | TransportFailure]:
    answer: HttpReply | TransportFailure = yield OpenStream(call, timeout_s)
    return answer


def read_stream() -> Steps[str | TransportFailure]:
    answer: str | TransportFailure = yield ReadStream()
    return answer


def get_retry_budget() -> Steps[RetryBudget]:
    answer: RetryBudget = yield GetRetryBudget()
    return answer


def copy_signature(method: Callable[..., Any], steps: Callable[..., Any]) -> None:
    """Copy name, docstring and parameters of a generator function to the method made of it."""
    update_wrapper(method, steps)
    signature = inspect.signature(steps)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    method.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[own, *signature.parameters.values()],
        return_annotation=inspect.Signature.empty,
    )
