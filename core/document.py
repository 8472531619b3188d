"""Base classes of every document: frozen, validated, with versioned JSON."""

from __future__ import annotations

import hashlib
import json
from importlib import metadata
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
from .validation_words import describe_violations

T = TypeVar("T")

MAX_NAME = 500

Name = Annotated[str, Field(max_length=MAX_NAME)]
"""A name in a document or a request: of a layer, a tensor, a module, a device. Names are copied
from documents into others, so that one of megabytes would be stored again with every plan."""

MAX_NOTE = 10_000

Note = Annotated[str, Field(max_length=MAX_NOTE)]
"""A sentence or a few, for people."""


class _FailFast(FailFast):
    """As `pydantic.FailFast`, also for a member of a union, whose members have to be hashable."""

    def __hash__(self) -> int:
        return hash(type(self))


LongTuple = Annotated[tuple[T, ...], _FailFast()]
"""A tuple that may have thousands of elements. Validation stops at the first invalid one: reporting
all of them took 1.2 GB and 20 s for a document of one megabyte."""

Notes = Annotated[LongTuple[Note], Field(max_length=10_000)]


def _not_empty(values: tuple[T, ...]) -> tuple[T, ...]:
    if not values:
        raise PydanticCustomError(
            "too_short", "Tuple should have at least 1 item after validation, not 0"
        )
    return values


NonEmptyTuple = Annotated[
    LongTuple[T], AfterValidator(_not_empty), Field(json_schema_extra={"minItems": 1})
]
"""A `LongTuple` with at least one element. ``min_length`` together with `FailFast` would report an
invalid element as a tuple that is too short."""


class Record(BaseModel):
    """A frozen part of a document, which rejects unknown fields, NaN and infinities."""

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
            # Without a version, a document counts as one of this release: people may write it.
            found = data.get("schema_version", cls.SCHEMA)
            # The kind first: the version of another kind of document would mislead.
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
        """Return the document as JSON text, its fields in declaration order."""
        return self.model_dump_json(indent=indent)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Parse a document.

        Raises:
            InvalidInput: The text is not JSON, or is another kind or version of document, or a
                field is invalid; the message lists every invalid field.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise to_invalid_input(error, cls.SCHEMA) from None

    def write(self, path: str | Path) -> None:
        """Write the document to a file atomically."""
        target = Path(path)
        # In the same folder, since `replace` is atomic only within one file system. A reader sees
        # the old document or the new one, never half of it.
        partial = target.with_name(target.name + ".partial")
        partial.write_text(self.to_json(indent=2) + "\n", encoding="utf-8")
        partial.replace(target)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a document from a file.

        Raises:
            InvalidInput: The file cannot be read, or does not hold a valid document of this kind.
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
        """Return an id that two documents share exactly if their contents are equal.

        It consists of the document's kind, an underscore, and a `json_digest`.
        """
        return f"{document_kind(self.SCHEMA)}_{content_digest(self)}"


def has_own_schema(schema: Any) -> bool:
    """Return True if the schema name is that of a document of this library."""
    return isinstance(schema, str) and schema.startswith("stagewright.")


def document_kind(schema: str) -> str:
    """Return the kind in a schema name: ``plan`` for ``stagewright.plan/1``."""
    return schema.rpartition(".")[2].partition("/")[0]


def content_digest(record: Record) -> str:
    """Return the `json_digest` of a record."""
    return json_digest(record.model_dump(mode="json"))


DIGEST_DIGITS = 32
"""Hexadecimal digits of a `json_digest`."""


def json_digest(value: Any) -> str:
    """Return 128 bits of the SHA-256 of a value's JSON with sorted keys, in hexadecimal."""
    # Stored ids depend on every byte of this form: sorted keys, no spaces, default escapes.
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:DIGEST_DIGITS]


def to_invalid_input(error: ValidationError, what: str) -> InvalidInput:
    """Convert pydantic's error to one message that names every invalid field."""
    found = [(json_pointer(place), told) for place, told in describe_violations(error.errors())]
    lines = "\n  ".join(f"{pointer or '(whole)'}: {told}" for pointer, told in found)
    return InvalidInput(f"not a valid {what}:\n  {lines}", field=found[0][0])


def json_pointer(location: tuple[int | str, ...]) -> str:
    """Return the RFC 6901 pointer to a location, e.g. ``/layers/3/forward/median_s``."""
    # `~` first, or the `~` of `~1` would be escaped again.
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in location)


class CompactRecord(Record):
    """A record whose JSON omits every field that has its default value."""

    @model_serializer(mode="wrap")
    def _leave_out_defaults(self, write: SerializerFunctionWrapHandler):  # type: ignore[no-untyped-def]  # noqa: ANN202 - a return type would replace the schema
        written: dict[str, Any] = write(self)
        fields = type(self).model_fields
        return {
            name: value
            for name, value in written.items()
            if fields[name].is_required()
            # The value itself, not its JSON, which may look different from an equal default.
            or getattr(self, name) != fields[name].get_default(call_default_factory=True)
        }


GROUP = "stagewright.drawers"
"""Entry points of this group take a document and return HTML."""


def render_html(kind: str, document: Any) -> str | None:
    """Return a document as HTML; `None` if no renderer for its kind is installed."""
    for found in metadata.entry_points(group=GROUP, name=kind):
        html = found.load()(document)
        assert isinstance(html, str), f"{found.value} gives HTML"
        return html
    return None
