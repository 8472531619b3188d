"""Types of settings: what a text from a variable or a flag becomes, and what is never shown."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator

SECRET: dict[str, Any] = {"secret": True}
"""The ``json_schema_extra`` of a setting that nobody is shown."""

MASK = "********"


def _split(value: Any) -> Any:
    """Words of a text with commas; anything else as it is."""
    if isinstance(value, str):
        return tuple(word.strip() for word in value.split(",") if word.strip())
    return value


Words = Annotated[tuple[str, ...], BeforeValidator(_split)]
"""A list in TOML; words with commas in a variable."""

NameSet = Annotated[frozenset[str], BeforeValidator(_split)]
"""The same, where order says nothing."""

Days = Annotated[float | None, BeforeValidator(lambda said: None if said == "never" else said)]
"""A number of days, or ``never``."""

_USER_INFO = re.compile(r"(?<=://)([^\s:/@]*):\S*@")
_PARAMETER = re.compile(r"(?i)([?&][a-z]*password=)[^&\s]*")


def without_passwords(text: str) -> str:
    """A text, the passwords of URLs in it hidden."""
    return _PARAMETER.sub(rf"\g<1>{MASK}", _USER_INFO.sub(rf"\g<1>:{MASK}@", text))
