"""The base of every value that crosses a border: frozen, validated, versioned JSON."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from .errors import InvalidInput

T = TypeVar("T")

LongTuple = Annotated[tuple[T, ...], FailFast()]
"""Of what a document may have thousands. The first that is wrong is told and no other: errors for
all of them took 1.2 GB and 20 s where the document has a megabyte."""


def _not_empty(values: tuple[T, ...]) -> tuple[T, ...]:
    if not values:
        raise PydanticCustomError(
            "too_short", "Tuple should have at least 1 item after validation, not 0"
        )
    return values


NonEmptyTuple = Annotated[
    tuple[T, ...], FailFast(), AfterValidator(_not_empty), Field(json_schema_extra={"minItems": 1})
]
"""The same, where none is too few; ``min_length`` beside `FailFast` would say so of wrong ones."""


class Record(BaseModel):
    """A frozen part of a document. Unknown fields, NaN and infinities are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Document(Record):
    """A frozen record with a name and a version, e.g. ``stagewright.plan/1``.

    Subclasses set ``SCHEMA`` and declare ``schema_version: Literal[SCHEMA] = SCHEMA``.
    """

    SCHEMA: ClassVar[str]

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_version(cls, data: Any) -> Any:
        if isinstance(data, dict):
            found = data.get("schema_version", cls.SCHEMA)
            if has_own_schema(found) and document_kind(found) != document_kind(cls.SCHEMA):
                raise ValueError(
                    f"expected a {document_kind(cls.SCHEMA)}, found a {document_kind(found)} "
                    f"({found})"
                )
            if found != cls.SCHEMA:
                raise ValueError(
                    f"schema_version is {found!r}, but this release reads {cls.SCHEMA!r}; "
                    "write the document again with this release, or install the release "
                    "that wrote it"
                )
        return data

    def to_json(self, *, indent: int | None = None) -> str:
        """The document as JSON text, its fields in declaration order."""
        return self.model_dump_json(indent=indent)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read a document.

        Raises:
            InvalidInput: Not JSON, another document or version, or a field that does not fit;
                the message lists every field at fault.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise to_invalid_input(error, cls.SCHEMA) from None

    def write(self, path: str | Path) -> None:
        """Write the document to a file, whole or not at all."""
        target = Path(path)
        partial = target.with_name(target.name + ".partial")
        partial.write_text(self.to_json(indent=2) + "\n", encoding="utf-8")
        partial.replace(target)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a document from a file.

        Raises:
            InvalidInput: The file is missing, unreadable or not such a document.
        """
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise InvalidInput(f"cannot read {path}: {error.strerror or error}") from None
        try:
            return cls.from_json(text)
        except InvalidInput as error:
            raise InvalidInput(f"{path} is {error}", field=error.field) from None

    def content_id(self) -> str:
        """An id that two documents share exactly when their contents are equal.

        The document's kind, an underscore, and 24 hexadecimal digits of the SHA-256 of its
        JSON with sorted keys.
        """
        return f"{document_kind(self.SCHEMA)}_{content_digest(self)}"


def has_own_schema(schema: Any) -> bool:
    """Whether it names a kind of document of this library."""
    return isinstance(schema, str) and schema.startswith("stagewright.")


def document_kind(schema: str) -> str:
    """``stagewright.plan/1`` → ``plan``."""
    return schema.rpartition(".")[2].partition("/")[0]


def content_digest(record: Record) -> str:
    """24 hexadecimal digits of the SHA-256 of the record's JSON with sorted keys."""
    return json_digest(record.model_dump(mode="json"))


def json_digest(value: Any) -> str:
    """24 hexadecimal digits of the SHA-256 of a value's JSON with sorted keys."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:24]


def to_invalid_input(error: ValidationError, what: str) -> InvalidInput:
    """One readable error out of pydantic's list, naming every field at fault."""
    lines = [
        f"{json_pointer(item['loc']) or '(whole)'}: {item['msg'].removeprefix('Value error, ')}"
        for item in error.errors()
    ]
    first = json_pointer(error.errors()[0]["loc"])
    return InvalidInput(f"not a valid {what}:\n  " + "\n  ".join(lines), field=first)


def json_pointer(location: tuple[int | str, ...]) -> str:
    """An RFC 6901 pointer, e.g. ``/layers/3/forward/median_s``."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in location)


class CompactRecord(Record):
    """A record whose JSON leaves out every field that has its default value."""

    @model_serializer(mode="wrap")
    def _leave_out_defaults(self, write: SerializerFunctionWrapHandler):  # type: ignore[no-untyped-def]  # noqa: ANN202 - a return type would replace the schema
        written: dict[str, Any] = write(self)
        fields = type(self).model_fields
        return {
            name: value
            for name, value in written.items()
            if fields[name].is_required()
            or getattr(self, name) != fields[name].get_default(call_default_factory=True)
        }
