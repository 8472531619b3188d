"""Documents, records and device lists read from files and command-line text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ...core.errors import InvalidInput
from .flag_names import fields_in_flags

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ...core.cluster.cluster import Cluster
    from ...core.document import Document

DocumentT = TypeVar("DocumentT", bound="Document")
RecordT = TypeVar("RecordT", bound="BaseModel")


def read_document(path: Path, *kinds: type[DocumentT]) -> DocumentT:
    """Read a file that holds one of several kinds of document, told apart by schema version."""
    text = read_json_file(path)
    try:
        found = schema_version(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} is not JSON: {_what_is_wrong(text, error)}") from None
    for kind in kinds:
        if found == kind.SCHEMA:
            try:
                return kind.from_json(text)
            except InvalidInput as error:
                raise InvalidInput(f"{path} is {error}", field=error.field) from None
    expected = " or ".join(kind.SCHEMA for kind in kinds)
    if found is None:
        raise InvalidInput(f"{path} is JSON without a schema_version; expected {expected}")
    raise InvalidInput(
        f"{path} is {found}; expected {expected} ('stagewright show {path}' prints what it is)"
    )


def _what_is_wrong(text: bytes, error: Exception) -> str:
    if not text.strip():
        return "it is empty; write it again"
    if text.startswith(b"PK"):
        return "it is an archive; of a .pt2, name what 'stagewright profile' or 'capture' writes"
    if not isinstance(error, json.JSONDecodeError):
        return "it is not text, or nested too deeply; name another file"
    if error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated"):
        return f"it ends too early, in line {error.lineno}; write it again"
    return f"line {error.lineno}, column {error.colno} cannot be read; correct it"


def read_json_file(path: Path) -> bytes:
    """Read a file; raise `InvalidInput` if that fails."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror or error}") from None


def schema_version(text: bytes) -> str | None:
    """Return a JSON document's schema version; `None` if it names none."""
    data = json.loads(text)
    found = data.get("schema_version") if isinstance(data, dict) else None
    return found if isinstance(found, str) else None


def read_devices(text: str) -> Cluster:
    """Read a cluster from a file, or from shorthand such as ``4x24GB`` or ``8xH200``."""
    from ...core.cluster.cluster import Cluster
    from ...core.cluster.shorthand import parse_devices

    if not text.strip():
        raise InvalidInput(
            "no devices given; write '4x24GB', '8xH200', '2xcpu', '4x8x80GB' for 4 nodes of 8, "
            "or name a cluster file (docs/guides/clusters.md)",
            field="/devices",
        )
    path = Path(text)
    # Of others that do not exist, "cannot parse devices" would not say that a file is missing.
    if not (path.suffix in (".json", ".yaml", ".yml", ".toml") or path.exists()):
        return parse_devices(text)
    return read_document(path, Cluster)


def build_record(kind: type[RecordT], **fields: object) -> RecordT:
    """Build a record from command-line options; errors name the flag and the values accepted."""
    from pydantic import ValidationError

    from ...core.document import to_invalid_input

    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        found = to_invalid_input(error, "set of options")
        raise InvalidInput(fields_in_flags(str(found)), field=found.field) from None


def read_json(kind: Any, text: str | bytes, what: str) -> Any:
    """Read a value of any type pydantic knows, unions such as `ModelSpec` included, from JSON."""
    from pydantic import TypeAdapter, ValidationError

    from ...core.document import to_invalid_input

    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError as error:
        raise to_invalid_input(error, what) from None
