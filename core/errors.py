"""The library's exceptions, grouped by what the caller does next.

StagewrightError
├── InvalidInput        fix the request: a field, a file, an option
├── Infeasible          relax a limit: the request is sound but nothing satisfies it
├── CaptureError        change the model or how it is captured
├── MeasurementError    the model ran and failed while being measured
│   └── OutOfMemory     use a smaller micro-batch, or a larger device
├── NonFinite           correct the data or the training: a loss or gradient is infinite or NaN
├── PlanMismatch        re-plan: the plan was made for another model, input or number of ranks
├── RankFailed          restart: a process of the pipeline died or stopped answering
├── Refused             get permission: it could be done, but is not allowed as asked
├── NotFound            use another id: nothing is stored under this one
├── Unreachable         try again later: the service does not answer
├── Cancelled           the job was stopped; submit it again if it is still wanted
├── DeadlineExceeded    allow more time, or take the best answer so far
└── ForeignError        report it: another process raised an error that is not this library's

An error travels between processes as its `ErrorRecord`, pickled or not. Its cause stays behind: a
traceback of another process is a note.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, get_type_hints

from annotated_types import Interval


@dataclass(frozen=True)
class ErrorRecord:
    """Everything that another process needs to raise an error again, as JSON values.

    Attributes:
        kinds: Names of the error's class and of its bases, the most specific first.
        message: The message.
        details: The attributes that its classes declare by annotations, but those that are `None`.
        notes: The notes added to it, such as a traceback.
    """

    kinds: tuple[str, ...]
    message: str
    details: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def as_dict(self) -> dict[str, Any]:
        """The record as JSON values."""
        return asdict(self)


class StagewrightError(Exception):
    """Base of every error this library raises on purpose.

    Attributes that a class declares by annotations, with values of JSON or of types that pydantic
    knows, survive the way into another process. A constructor may take anything.
    """

    def to_record(self) -> ErrorRecord:
        """Return the error in the form in which it travels."""
        from pydantic_core import to_jsonable_python  # commands that only print help do without

        names = get_type_hints(type(self))
        kinds = [kind.__name__ for kind in type(self).__mro__ if issubclass(kind, StagewrightError)]
        details = {name: value for name in names if (value := getattr(self, name)) is not None}
        return ErrorRecord(
            kinds=tuple(kinds[:-1]),
            message=str(self),
            details=to_jsonable_python(details, fallback=repr),
            notes=tuple(getattr(self, "__notes__", ())),
        )

    @classmethod
    def from_record(
        cls,
        record: ErrorRecord | Mapping[str, Any],
        among: Collection[type[StagewrightError]] = (),
    ) -> StagewrightError:
        """Return the error of a record, of the most specific of its classes that is known here.

        Args:
            record: The record, which may come from another release: details that the class does
                not have, or whose values it does not accept, are left out.
            among: The classes that are accepted; by default every class that is imported.

        Returns:
            An error of this class itself if none of the record's classes is accepted.

        Raises:
            ValueError: It is not a record.
        """
        from pydantic import TypeAdapter, ValidationError

        given = record.as_dict if isinstance(record, ErrorRecord) else dict(record)
        text = to_printable(json.dumps(given, ensure_ascii=False))
        found = TypeAdapter(ErrorRecord).validate_json(text)
        known = {kind.__name__: kind for kind in among or _subclasses(StagewrightError)}
        kind = next((known[name] for name in found.kinds if name in known), cls)
        error = kind.__new__(kind, found.message)  # constructors may take other arguments
        error.args = (found.message,)
        for name, accepted in get_type_hints(kind, include_extras=True).items():
            try:
                value = json.dumps(found.details[name])
                setattr(error, name, TypeAdapter(accepted).validate_json(value))
            except (KeyError, ValidationError):
                setattr(error, name, getattr(kind, name, None))
        for note in found.notes:
            error.add_note(note)
        return error

    def at(self, where: str) -> StagewrightError:
        """Return the error with its place, such as ``rank 3``, in front of the message."""
        return type(self).from_record(replace(self.to_record(), message=f"{where}: {self}"))

    def __reduce__(self) -> tuple[Any, ...]:
        # By default a pickle calls the constructor with the message alone. That fails where it
        # takes more, in the process that reads the pickle, and an executor takes that for its end.
        return type(self).from_record, (self.to_record(), (type(self),))


def _subclasses(kind: type[StagewrightError]) -> Iterator[type[StagewrightError]]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


Size = Annotated[int, Interval(ge=0, lt=2**63)]
"""A number of bytes as databases keep it; some come from processes that are not trusted."""


class InvalidInput(StagewrightError, ValueError):
    """The request itself is wrong; the message names the field and what is accepted.

    Args:
        message: What is wrong and what to do.
        field: JSON pointer of the offending field, when there is one.
    """

    field: str | None = None

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class Infeasible(StagewrightError):
    """No plan satisfies the limits.

    Args:
        message: The binding constraint with both numbers, and the remedies.
        constraint: Short name of the binding constraint, e.g. ``"memory"``.
        required: Requirement of the best attempt, in the constraint's unit.
        available: The limit, in the same unit.
        remedies: `core.plan.plan.Remedy` objects, those on the same devices first.
        summary: The message without the remedies; all of it by default.
    """

    constraint: str = ""
    required: float | None = None
    available: float | None = None
    # Errors are below clusters and options, which a remedy holds: `core.plan.plan` names the type.
    remedies: tuple[Any, ...] = ()
    summary: str = ""

    def __init__(
        self,
        message: str,
        *,
        constraint: str,
        required: float | None = None,
        available: float | None = None,
        remedies: tuple[Any, ...] = (),
        summary: str = "",
    ) -> None:
        super().__init__(message)
        self.summary = summary or message
        self.constraint = constraint
        self.required = required
        self.available = available
        self.remedies = remedies

    def with_advice(self, advice: str, remedies: tuple[Any, ...]) -> Infeasible:
        """Return the error with these remedies, and with the advice behind its summary."""
        return Infeasible(
            f"{self.summary}; {advice}",
            constraint=self.constraint,
            required=self.required,
            available=self.available,
            remedies=remedies,
            summary=self.summary,
        )


class CaptureError(StagewrightError):
    """A model could not be turned into a graph.

    Args:
        message: What happened and the remedies.
        module: Fully qualified name of the module that caused it, if known.
        operation: The operation or source line that caused it, if known.
    """

    module: str | None = None
    operation: str | None = None

    def __init__(
        self, message: str, *, module: str | None = None, operation: str | None = None
    ) -> None:
        super().__init__(message)
        self.module = module
        self.operation = operation


class MeasurementError(StagewrightError):
    """The model was captured but failed during measurement; the message names the layer."""


class OutOfMemory(MeasurementError):
    """Measuring a layer needed more memory than available; the message has both numbers.

    Args:
        message: Where, how much was needed, and the remedies.
        layer: Name of the layer; `None` if the model as a whole does not fit.
        required_bytes: Memory needed by the layer, or by the whole model.
        available_bytes: Total memory of the device, or the limit, if known.
    """

    layer: str | None = None
    required_bytes: Size | None = None
    available_bytes: Size | None = None

    def __init__(
        self,
        message: str,
        *,
        layer: str | None = None,
        required_bytes: int | None = None,
        available_bytes: int | None = None,
    ) -> None:
        super().__init__(message)
        self.layer = layer
        self.required_bytes = required_bytes
        self.available_bytes = available_bytes


class NonFinite(StagewrightError, FloatingPointError):
    """A loss or a gradient is infinite or NaN; the message says where it arose."""


class PlanMismatch(StagewrightError):
    """A plan does not belong to this model, this input or this number of ranks."""


class RankFailed(StagewrightError):
    """A process of a pipeline died or stopped answering.

    Args:
        message: Which rank failed and what this rank was waiting for.
        ranks: The ranks held to have failed, lowest first; empty if all still answer.
    """

    ranks: tuple[int, ...] = ()

    def __init__(self, message: str, *, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class Refused(StagewrightError):
    """The request is possible but not permitted; the message says what would permit it."""


class NotFound(StagewrightError):
    """Nothing is stored under the given id."""


class Unreachable(StagewrightError, ConnectionError):
    """The service cannot be reached, or is temporarily unavailable."""


class Cancelled(StagewrightError):
    """A job was cancelled before it finished."""


class DeadlineExceeded(StagewrightError):
    """The time allowed ran out before there was an answer."""


class ForeignError(StagewrightError):
    """Another process raised an error that is not this library's; the message begins with its name.

    That process's traceback is a note.
    """

    @property
    def remote_traceback(self) -> str:
        """Traceback of the process that raised the error."""
        return "\n".join(getattr(self, "__notes__", ()))

    @classmethod
    def of(cls, error: BaseException) -> StagewrightError:
        """Return an error in a form that can be sent: itself if it is this library's."""
        if isinstance(error, StagewrightError):
            return error
        found = cls(f"{type(error).__name__}: {error}")
        found.add_note("".join(traceback.format_exception(error)))
        return found


def to_printable(text: str) -> str:
    """Return text without lone surrogates, which JSON may hold and UTF-8 cannot."""
    return text.encode("utf-8", "replace").decode()


MAX_LINE = 1000


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; the exception's class name if it is empty."""
    # torch appends whole tracebacks and graphs to its messages.
    lines = str(error).strip().splitlines()
    return lines[0][:MAX_LINE] if lines else type(error).__name__
