"""Redaction: secrets are masked in everything that is logged."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

MASK = "********"

MIN_CHARACTERS = 6
"""Shorter secrets are not masked: they occur in ordinary words."""

_PATTERNS = (
    re.compile(r"sw_[A-Za-z0-9_-]{43}"),  # API keys
    re.compile(r"eyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*"),  # JSON Web Tokens
    re.compile(r"(?i)(?<=bearer )\s*[A-Za-z0-9._~+/-]+=*"),
)

_MARKS = ("sw_", "eyj", "bearer", "://", "password=")
"""Lower-case texts of which one occurs in every match of a pattern. Most lines have none and skip
the patterns."""

# Greedy up to the last "@": passwords may contain "@" and "/".
_USER_INFO = re.compile(r"(?<=://)([^\s:/@]*):\S*@")
_PARAMETER = re.compile(r"(?i)([?&][a-z]*password=)[^&\s]*")


class Scrubber:
    """Processor of structlog that masks secrets in log lines.

    API keys, JWTs, bearer tokens and passwords in URLs are recognised by their form.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        known = sorted((text for text in secrets if len(text) >= MIN_CHARACTERS), key=len)
        # Longest first: a secret may be the beginning of another.
        self._known = re.compile("|".join(map(re.escape, reversed(known)))) if known else None

    def __call__(
        self, logger: object, method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        return {name: self.scrub(value) for name, value in event.items()}

    def scrub(self, value: Any) -> Any:
        """Return a value with secrets masked; objects are replaced by their ``repr``."""
        if isinstance(value, str):
            return self._masked(value)
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, Mapping):
            return {str(name): self.scrub(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [self.scrub(inner) for inner in value]
        return self._masked(repr(value))

    def _masked(self, text: str) -> str:
        if self._known is not None:
            text = self._known.sub(MASK, text)
        folded = text.lower()
        if not any(mark in folded for mark in _MARKS):
            return text
        for pattern in _PATTERNS:
            text = pattern.sub(MASK, text)
        return without_passwords(text)


def without_passwords(text: str) -> str:
    """Return a text with the passwords of URLs masked."""
    return _PARAMETER.sub(rf"\g<1>{MASK}", _USER_INFO.sub(rf"\g<1>:{MASK}@", text))
