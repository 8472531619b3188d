"""Settings of a runtime's command, environment or configuration: each is read, or named in a note.

``tables/settings.toml`` says of every runtime which settings its reader understands, which ones
move weights or change times and are not read, and which ones do neither. Whatever else a text sets
is named as not known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Literal, get_args

from ..core.errors import InvalidInput
from ..core.units import list_some
from .target_tables import read_table

MOST_NAMED = 12
"""Settings that a note names."""

MOST_SHOWN = 60
"""Characters of a value that a note shows."""

Kind = Literal["pipeline", "tensor", "counts", "words", "switches", "unread", "harmless"]
KINDS: tuple[Kind, ...] = get_args(Kind)

OFF = ("false", "none", "null", "off", "auto", "default")
"""Values by which every setting that is not read changes nothing."""

_QUOTED = r"\"((?:[^\"\\]|\\.){0,9999})\"|'([^']{0,9999})'"
_FLAG = re.compile(
    r"(?<![^\s\"'(\[,;])(?!-e\b|--env\b)(--?[A-Za-z][\w.-]*)[\"']?"
    r"(?:(?:=|[ \t]+|,\s*|[ \t]*\n[ \t]*-[ \t]+)"
    rf"(?:{_QUOTED}|((?![-\\|&<>{{])[^\s\"'\\;)\]}}]+|-\d[\d.]*)))?"
)
_KEY = re.compile(
    r"(?<![\w.$/-])[\"']?([A-Za-z_][\w.-]*)[\"']?[ \t]*"
    r"(?::(?!//)[ \t]*|(?<=[ \t])=(?!=)[ \t]*|=(?!=))"  # 'A= b' sets A to nothing, as in a shell
    rf"(?:{_QUOTED}|(\[[^\[\]]{{0,99999}}\]|[^\s\"'\\;(){{}}\[\],]+(?:,[^\s\"'\\;(){{}}\[\],]+)*(?![\w(]))?)"
)
_VARIABLE = re.compile(
    r"^[ \t]*(?:export[ \t]+)?(\w+)=[\"']?(\d[\d.,/]*)[\"']?[ \t]*(?:;.*)?$", re.MULTILINE
)
_USE = re.compile(r"\$\{?(\w+)(?::-(\d[\d.,/]*)\})?\}?")
_ENTRY = re.compile(r"\bname:[ \t]*[\"']?(\w+)[\"']?[ \t]*\n[ \t]*value:[ \t]*")
_ENVIRON = re.compile(
    r"\b(?:os\.)?(?:environ(?:\.setdefault)?|putenv)[\[(] *[\"'](\w+)[\"']\]? *[=,](?!=) *"
)
_CODE = re.compile(r"^(?:import|from|def|class) ", re.MULTILINE)


@dataclass(frozen=True)
class _Row:
    """One setting of a runtime: its name in the code, and the values, or patterns, behind a bar."""

    kind: Kind
    name: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class SettingsTable:
    """Settings of a runtime by each of their names."""

    rows: Mapping[str, _Row]
    prefix: str = ""
    variables: tuple[str, ...] = ()
    keys: bool = False
    together: tuple[str, ...] = ()

    @classmethod
    @cache
    def of(cls, runtime: str) -> SettingsTable:
        """Return the table of a runtime, by the name of its target."""
        tables = read_table("settings")
        own = tables.get(runtime, {})
        rows: dict[str, _Row] = {}
        for table in (tables["every"], own):
            for kind in KINDS:
                listed = table.get(kind, [])
                for row in listed.split() if isinstance(listed, str) else listed:
                    names, _, values = row.partition("|")
                    first, *_ = names.split()
                    entry = _Row(kind, first, tuple(values.split()))
                    rows |= dict.fromkeys(names.split(), entry)
        return cls(
            rows,
            own.get("prefix", ""),
            tuple(own.get("variables", ())),
            "keys" in own,
            tuple(own.get("together", ())),
        )

    def find(self, written: str) -> _Row | None:
        """Return the setting of a name as it is written in a text; the longest stem that fits."""
        name = written.strip("-.").rpartition(".")[2].replace("_", "-")
        name = name if len(name) == 1 else name.lower().removeprefix(self.prefix)
        for each in (name, name.removeprefix("no-")):
            stems = (key for key in self.rows if key[-1] == "*" and each.startswith(key[:-1]))
            if row := self.rows.get(each) or self.rows.get(max(stems, key=len, default="")):
                return row
        return None

    def names_unknown(self, written: str, is_code: bool) -> bool:
        """Return whether a name that is in no row is a setting, and not a name of the text's own.

        Programs and scripts have variables, and device maps and the like have names of modules.
        """
        if written.startswith("-"):
            return True
        if written.isupper():
            return written.startswith(self.variables or ("-",))
        return self.keys and not is_code


@dataclass(frozen=True)
class Settings:
    """Settings that a text in a runtime's form makes.

    Attributes:
        text: The text, without comments and with the numbers of shell variables in their places.
        pipeline: Ranks of the pipeline; `None` if the text does not say.
        tensor: Devices that split each layer.
        counts: Whole numbers that the reader understands, switches among them, by their names.
        words: Other values that it understands.
        written: Each setting that it understands, as it is written.
        notes: What was read, and what was not.
    """

    text: str
    pipeline: int | None = None
    tensor: int = 1
    counts: Mapping[str, int] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)
    written: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @classmethod
    def read(cls, text: str, runtime: str) -> Settings:
        """Read what a text sets, by the table of the runtime; of several values the last counts.

        Raises:
            InvalidInput: A value is not the number it should be, or a group has no devices.
        """
        table, text = SettingsTable.of(runtime), fill_variables(drop_comments(text))
        sizes: dict[str, dict[str, int]] = {"pipeline": {}, "tensor": {}}
        counts: dict[str, int] = {}
        words: dict[str, str] = {}
        written: dict[str, str] = {}
        unread: dict[str, str] = {}
        unknown: dict[str, str] = {}
        settings, is_code = list(list_settings(text)), _CODE.search(text) is not None
        rows = {name: table.find(name) for name in {name for name, _ in settings}}
        for name, value in settings:
            row, shown = rows[name], show_setting(name, value)
            if row is None:
                if table.names_unknown(name, is_code) and (value or name.startswith("-")):
                    unknown[name] = shown
            elif row.kind == "harmless" or (row.kind == "words" and not value):
                continue
            elif row.kind == "words" and any(
                re.fullmatch(each, value) for each in row.values or (".*",)
            ):
                words[row.name], written[row.name] = value, shown
            elif row.kind == "switches":
                is_on = value.lower() not in (*OFF, "no", "0")
                counts[row.name], written[row.name] = int(is_on), name
            elif row.kind not in ("unread", "words") and re.fullmatch(r"-?\d{1,7}", value):
                sizes.get(row.kind, counts)[row.name], written[row.name] = int(value), shown
            elif value.lower() in (*OFF, *(row.values if row.kind == "unread" else ())):
                continue
            elif row.kind in ("unread", "words") or not value or "$" in value or is_code:
                unread[row.name] = shown
            else:
                raise InvalidInput(f"{shown} is no whole number")
        if set(table.together) - words.keys():
            for name in words.keys() & set(table.together):
                unread[name] = written.pop(name)
                del words[name]
        for name, size in {**sizes["pipeline"], **sizes["tensor"]}.items():
            if size < 1:
                raise InvalidInput(f"{written[name]} is no number of devices; give at least 1")
        notes = {
            "read": written,
            "not read, though the answer depends on it:": unread,
            "not read, since not known here:": unknown,
        }
        return cls(
            text,
            prod(sizes["pipeline"].values()) if sizes["pipeline"] else None,
            prod(sizes["tensor"].values()),
            counts,
            words,
            written,
            tuple(
                f"{label} {list_some([*named.values()], MOST_NAMED)}"
                for label, named in notes.items()
                if named
            ),
        )


def list_settings(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name and value of each flag, variable and key; an empty value where it has none."""
    # The value of a flag may have an equals sign itself. Flags come last: they replace variables.
    for found in (*_KEY.finditer(_FLAG.sub(" ", text)), *_FLAG.finditer(text)):
        name, *parts = found.groups()
        yield name, next((part for part in parts if part is not None), "").rstrip(",")


def show_setting(name: str, value: str) -> str:
    """Return a setting as it is written, with the beginning of a long value."""
    value = value if len(value) <= MOST_SHOWN else f"{value[:MOST_SHOWN]}..."
    return f"{name}{(' ' if name.startswith('-') else '=') if value else ''}{value}"


def drop_comments(text: str) -> str:
    """Return a text without lines that are comments, and without those at the ends of others."""
    kept = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    parts = (line.partition(" #") for line in kept)
    return "\n".join(  # a mark behind an open quote is part of a string
        f"{head}{mark}{tail}" if any(head.count(quote) % 2 for quote in "\"'") else head
        for head, mark, tail in parts
    )


def fill_variables(text: str) -> str:
    """Return a text with what it sets in its environment as in a shell, and variables filled in."""
    text = _ENVIRON.sub(r"\1=", _ENTRY.sub(r"\1=", text))
    for _ in range(2):  # a variable may itself be given by another, or by a default
        values = dict(_VARIABLE.findall(text))
        text = _USE.sub(lambda use: values.get(use[1]) or use[2] or use[0], text)  # noqa: B023
    return text
