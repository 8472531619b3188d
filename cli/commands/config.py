"""``stagewright config``: show the settings a server would start with."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument

from ..options.service import ConfigFlag
from ..support.next_steps import command_line
from ..support.output import JsonFlag, emit, say, say_next

if TYPE_CHECKING:
    from ...api.settings.load import Configuration


def command(
    action: Annotated[
        Literal["show"], Argument(metavar="ACTION", help="show: each value and its origin.")
    ] = "show",
    file: ConfigFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Show the settings a server would start with here, and where each comes from.

    Flags take precedence over variables STAGEWRIGHT_<NAME>, these over the settings file, and
    that over defaults. Secrets are not shown; if one cannot be read here, the reason is shown
    instead. Unknown settings are refused, as by the server.
    """
    from ...api.settings.load import configure

    found = configure(file=file, strict=False)
    lines = describe_settings(found)
    emit(json.dumps({"settings": lines}) if as_json else _table(lines))
    if found.troubles:
        say(
            f"a server would not start with these settings: {'; '.join(found.troubles.values())}",
            quiet=as_json,
        )
        return
    words = ("--config", str(file)) if file is not None else ()
    say_next(command_line("serve", *words), quiet=as_json)


def describe_settings(configuration: Configuration) -> list[dict[str, Any]]:
    """Return each setting's value (secrets masked), variable, origin and meaning."""
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
    """Format name, value and origin in columns; long values are truncated."""
    rows = [(line["name"], _format(line["value"]), _origin(line)) for line in lines]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(
        f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}" for name, value, origin in rows
    )


def _origin(line: dict[str, Any]) -> str:
    origin = " ".join(filter(None, (line["origin"], line["place"])))
    return f"{origin}  ({line['trouble']})" if line["trouble"] else origin


def _format(value: Any) -> str:
    """Format a value as in a settings file; a dash for `None`."""
    text = "-" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 50 else text[:47] + "..."
