"""Types of settings: how text from variables is parsed, and how secrets are masked."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator

SECRET: dict[str, Any] = {"secret": True}
"""``json_schema_extra`` of a secret setting."""

MASK = "********"


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

# Greedy up to the last "@": passwords may contain "@" and "/".
_USER_INFO = re.compile(r"(?<=://)([^\s:/@]*):\S*@")
_PARAMETER = re.compile(r"(?i)([?&][a-z]*password=)[^&\s]*")


def without_passwords(text: str) -> str:
    """Return a text with the passwords of URLs masked."""
    return _PARAMETER.sub(rf"\g<1>{MASK}", _USER_INFO.sub(rf"\g<1>:{MASK}@", text))
