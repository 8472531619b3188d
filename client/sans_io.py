"""What a client does, as steps: generators that ask for input and output and do none themselves.

A method is written once, as a generator of steps that returns its answer. `blocking` and
`awaiting` carry the steps out, each in its own way; nothing else differs between the two clients.
"""

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
class Call:
    """A request.

    Attributes:
        is_repeatable: Whether sending it twice does no more than sending it once.
    """

    method: str
    path: str
    params: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None
    is_repeatable: bool = True

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass(frozen=True)
class Reply:
    """What came back, whatever its status.

    Attributes:
        headers: Their names in small letters.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes = b""

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    def read(self, model: type[Model]) -> Model:
        """The body as a model. Fields that a later release added are passed over.

        Raises:
            StagewrightError: It is something else.
        """
        try:
            return model.model_validate_json(self.body, extra="ignore")
        except ValidationError as error:
            raise StagewrightError(
                f"the service answered {self.status} with something that is no {model.__name__}; "
                f"is it of another release than this client? {error}"
            ) from None


@dataclass(frozen=True)
class Failure:
    """Nothing came back, or not all.

    Attributes:
        reason: In the transport's words.
        was_sent: Whether the service may have seen the request.
        is_timeout: Whether it was waited for too long.
    """

    reason: str
    was_sent: bool = True
    is_timeout: bool = False


@dataclass(frozen=True)
class Send:
    """Do a request; answered with a `Reply` or a `Failure`."""

    call: Call
    timeout_s: float


@dataclass(frozen=True)
class Listen:
    """Open a stream; answered with a `Reply`, without its body if that goes on, or a `Failure`."""

    call: Call
    timeout_s: float


@dataclass(frozen=True)
class Hear:
    """Answered with text of the open stream, an empty one at its end, or a `Failure`."""


@dataclass(frozen=True)
class Sleep:
    """Do nothing for a while."""

    time_s: float


FIRST_DELAY_S = 0.25
LONGEST_DELAY_S = 8.0


@dataclass(frozen=True)
class Patience:
    """How long one call may take, attempts and pauses together.

    Attributes:
        timeout_s: In seconds.
        clock: Seconds that never go back.
        jitter: From 0 up to 1: clients that failed together should not return together.
        address: Who is asked, for messages.
        on_wait: Told once for each call that its service does not answer and is waited for.
    """

    timeout_s: float
    clock: Callable[[], float]
    jitter: Callable[[], float] = random.random
    address: str = ""
    on_wait: Callable[[str], None] | None = None

    def delay_s(self, attempt: int) -> float:
        """How long to wait after a number of attempts: doubling, at least half of it."""
        longest: float = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** min(attempt - 1, 10))
        return longest * (0.5 + 0.5 * self.jitter())


@dataclass(frozen=True)
class AskPatience:
    """Answered with the client's `Patience`."""


Step: TypeAlias = Send | Listen | Hear | Sleep | AskPatience
Steps: TypeAlias = Generator[Step, Any, Result]
"""Work that returns a result."""


def send(call: Call, timeout_s: float) -> Steps[Reply | Failure]:
    """See `Send`."""
    answer: Reply | Failure = yield Send(call, timeout_s)
    return answer


def listen(call: Call, timeout_s: float) -> Steps[Reply | Failure]:
    """See `Listen`."""
    answer: Reply | Failure = yield Listen(call, timeout_s)
    return answer


def hear() -> Steps[str | Failure]:
    """See `Hear`."""
    answer: str | Failure = yield Hear()
    return answer


def own_patience() -> Steps[Patience]:
    """See `AskPatience`."""
    answer: Patience = yield AskPatience()
    return answer


def as_method(method: Callable[..., Any], steps: Callable[..., Any]) -> None:
    """Give a method the name, documentation and parameters of the function it is made of."""
    update_wrapper(method, steps)
    signature = inspect.signature(steps)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    method.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[own, *signature.parameters.values()],
        return_annotation=inspect.Signature.empty,
    )
