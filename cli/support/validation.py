"""Building records from command-line options, with their errors made readable."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from ...core.document import to_invalid_input
from ...core.errors import InvalidInput
from .flag_names import fields_in_flags

RecordT = TypeVar("RecordT", bound=BaseModel)


def checked(kind: type[RecordT], **fields: object) -> RecordT:
    """Build a record.

    Raises:
        InvalidInput: A field does not fit; the message names it and what is accepted.
    """
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        found = to_invalid_input(error, f"set of options ({kind.__name__})")
        raise InvalidInput(fields_in_flags(str(found)), field=found.field) from None


def checked_json(kind: Any, text: str | bytes, what: str) -> Any:
    """Read a value of a type pydantic knows (also a union, such as `ModelSpec`) from JSON.

    Raises:
        InvalidInput: Not JSON, or a field does not fit.
    """
    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError as error:
        raise to_invalid_input(error, what) from None
