"""Secrets out of everything that is logged, whoever put them there."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

from ..settings.types import MASK, without_passwords

MIN_CHARACTERS = 6
"""A shorter secret is a word of the language, and every line would be full of masks."""

_PATTERNS = (
    re.compile(r"sw_[A-Za-z0-9_-]{43}"),  # API keys
    re.compile(r"eyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*"),  # JSON Web Tokens
    re.compile(r"(?i)(?<=bearer )\s*[A-Za-z0-9._~+/-]+=*"),
)

_MARKS = ("sw_", "eyj", "bearer", "://", "password=")
"""Text without any of these, in small letters, fits no pattern: most of what is logged."""


class Scrubber:
    """Masks secrets in a log line; a processor of structlog.

    API keys, tokens of identity providers, bearer tokens and passwords of URLs are known by their
    look.

    Args:
        secrets: Those that have none: the server's own token, the database's password.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        known = sorted((text for text in secrets if len(text) >= MIN_CHARACTERS), key=len)
        self._known = re.compile("|".join(map(re.escape, reversed(known)))) if known else None

    def __call__(
        self, logger: object, method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        return {name: self.scrubbed(value) for name, value in event.items()}

    def scrubbed(self, value: Any) -> Any:
        """A value without secrets; what is no plain data becomes its text first."""
        if isinstance(value, str):
            return self._masked(value)
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, Mapping):
            return {str(name): self.scrubbed(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple | set | frozenset):
            return [self.scrubbed(inner) for inner in value]
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
