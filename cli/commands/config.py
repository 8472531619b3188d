"""``stagewright config``: the settings a server would start with."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from ..support.next_steps import command_line
from ..support.output import JsonFlag, emit, say, say_next

if TYPE_CHECKING:
    from ...api.settings.load import Configuration


class Action(Enum):
    """What to do with settings."""

    SHOW = "show"


def command(
    action: Annotated[Action, Argument(help="show: each value and who said it.")] = Action.SHOW,
    file: Annotated[
        Path | None,
        Option("--config", help="Settings file, in TOML (also STAGEWRIGHT_CONFIG)."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show the settings a server would start with here, and where each comes from.

    A flag comes before the variable STAGEWRIGHT_<NAME>, that before the file, that before the
    default. Secrets are not shown; one that cannot be read here says so in its place. Names that
    are no setting's are refused, as by the server.
    """
    from ...api.settings.load import configure

    found = configure(file=file, strict=False)
    lines = described(found)
    emit(json.dumps({"settings": lines}) if as_json else _table(lines))
    if found.troubles:
        say(f"a server would not start: {'; '.join(found.troubles.values())}", quiet=as_json)
        return
    words = ("--config", str(file)) if file is not None else ()
    say_next(command_line("serve", *words), quiet=as_json)


def described(configuration: Configuration) -> list[dict[str, Any]]:
    """Every setting with its value as it may be seen, its variable, its origin and its meaning."""
    from ...api.settings.names import setting_names

    return [
        {
            "name": setting.name,
            "value": setting.shown(configuration.value(setting)),
            "origin": configuration.origins[setting.name].kind,
            "place": configuration.origins[setting.name].place,
            "variable": setting.variable,
            "help": setting.help,
            "trouble": configuration.troubles.get(setting.name),
        }
        for setting in setting_names()
    ]


def _table(lines: list[dict[str, Any]]) -> str:
    """Name, value and who said it, in columns, the long ones cut."""
    rows = [(line["name"], _word(line["value"]), _origin(line)) for line in lines]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(
        f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for name, value, origin in rows
    )


def _origin(line: dict[str, Any]) -> str:
    said = " ".join(filter(None, (line["origin"], line["place"])))
    return f"{said}  ({line['trouble']})" if line["trouble"] else said


def _word(value: Any) -> str:
    """A value as a file would have it; a dash for none."""
    text = "-" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 50 else text[:47] + "..."
