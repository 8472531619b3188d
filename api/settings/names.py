"""Names of the settings: ``grace_s``, or ``oidc.issuer`` in a section."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ..telemetry.redaction import MASK, without_passwords
from .settings import PREFIX, ServerSettings


@dataclass(frozen=True)
class SettingName:
    """A setting's name, meaning and default.

    Attributes:
        path: Name of the field, after that of its section.
        help: Meaning, in Markdown.
        default: `None` if there is no default.
        is_secret: True if the value is never shown.
    """

    path: tuple[str, ...]
    help: str
    default: Any
    is_secret: bool

    @property
    def name(self) -> str:
        return ".".join(self.path)

    @property
    def variable(self) -> str:
        return PREFIX + "_".join(self.path).upper()

    def shown(self, value: Any) -> Any:
        """Return a value fit for JSON and for display, with secrets masked."""
        if value is None or isinstance(value, bool | int | float):
            return value
        if self.is_secret:
            return MASK
        if isinstance(value, tuple | list | frozenset | set):
            ordered = sorted(value) if isinstance(value, frozenset | set) else value
            return [without_passwords(str(word)) for word in ordered]
        return without_passwords(str(value))


def setting_names(model: type[BaseModel] = ServerSettings) -> tuple[SettingName, ...]:
    """Return all settings in order of declaration."""
    return tuple(_below(model, ()))


def suggest_setting(name: str, known: Sequence[str]) -> str:
    """Return the nearest known name, as the end of a message."""
    ends = {other.removeprefix(PREFIX): other for other in known}
    found = get_close_matches(name.removeprefix(PREFIX), ends, n=1, cutoff=0.6)
    return f"did you mean {ends[found[0]]}?" if found else "'stagewright config show' lists them"


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the record class of a field that is a section."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _below(model: type[BaseModel], path: tuple[str, ...]) -> Iterator[SettingName]:
    for name, field in model.model_fields.items():
        section = section_of(field)
        if section is not None:
            yield from _below(section, (*path, name))
            continue
        extra = field.json_schema_extra
        yield SettingName(
            path=(*path, name),
            help=field.description or "",
            default=None if field.is_required() else field.get_default(call_default_factory=True),
            is_secret=isinstance(extra, dict) and bool(extra.get("secret")),
        )
