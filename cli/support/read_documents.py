"""Reading the documents that commands take as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ...core.errors import InvalidInput

if TYPE_CHECKING:
    from ...core.cluster.cluster import Cluster
    from ...core.document import Document

DocumentT = TypeVar("DocumentT", bound="Document")


def read_document(path: Path, *kinds: type[DocumentT]) -> DocumentT:
    """Read a file that holds one of several kinds of document, told apart by its version.

    Raises:
        InvalidInput: The file is missing, not JSON, of no such kind, or invalid.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror or error}") from None
    found = _schema_version(path, text)
    for kind in kinds:
        if found == kind.SCHEMA:
            try:
                return kind.from_json(text)
            except InvalidInput as error:
                raise InvalidInput(f"{path} is {error}", field=error.field) from None
    expected = " or ".join(kind.SCHEMA for kind in kinds)
    raise InvalidInput(f"{path} is {found or 'JSON without a schema_version'}; expected {expected}")


def read_devices(text: str) -> Cluster:
    """A cluster from a file, or from shorthand such as ``4x24GB`` or ``8xH200``.

    Raises:
        InvalidInput: Neither a readable cluster file nor shorthand.
    """
    from ...core.cluster.cluster import Cluster
    from ...core.cluster.shorthand import parse_devices

    if not text.strip():
        raise InvalidInput(
            "the devices are empty; write '4x24GB', '8xH200', '2xcpu', '4x8x80GB' for 4 nodes of "
            "8, or give a cluster file (docs/clusters.md)",
            field="/devices",
        )
    path = Path(text)
    if not (path.suffix == ".json" or path.exists()):
        return parse_devices(text)
    return read_document(path, Cluster)


def _schema_version(path: Path, text: bytes) -> str | None:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} is not JSON: {error}") from None
    found = data.get("schema_version") if isinstance(data, dict) else None
    return found if isinstance(found, str) else None
