"""Types of settings: how text from variables is parsed, and which are secret."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

SECRET: dict[str, Any] = {"secret": True}
"""``json_schema_extra`` of a secret setting."""


def _split(value: Any) -> Any:
    """Return the items of a comma-separated text, and any other value unchanged."""
    if isinstance(value, str):
        return tuple(word.strip() for word in value.split(",") if word.strip())
    return value


Words = Annotated[tuple[str, ...], BeforeValidator(_split)]
"""List in TOML, comma-separated in a variable."""

NameSet = Annotated[frozenset[str], BeforeValidator(_split)]
"""Set of names, written like `Words`."""

Days = Annotated[float | None, BeforeValidator(lambda days: None if days == "never" else days)]
"""Number of days, or ``never``."""
