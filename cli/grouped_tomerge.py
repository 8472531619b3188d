"""Help of commands with many options, in groups.

An option names its group in ``rich_help_panel``. Typer draws such groups with rich only, whose
import would triple the time of ``--help`` (see `main`).
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

OTHER = "Options"


class GroupedCommand(TyperCommand):
    """A command whose help has a section for each group, in the order of the options."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the sections; options without a group come last."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                panel = getattr(parameter, "rich_help_panel", None)
                name = "Arguments" if parameter.param_type_name == "argument" else panel or OTHER
                groups.setdefault(name, []).append(record)
        for name in sorted(groups, key=lambda name: name == OTHER):
            with formatter.section(name):
                formatter.write_dl(groups[name])
