"""Sphinx configuration of the documentation site; `make docs` builds it."""

from __future__ import annotations

import contextlib
import io

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx
from typer.main import get_command

import stagewright
from stagewright.cli.main import build_app, main

project = "Stagewright"
author = "the Stagewright authors"
copyright = author
release = version = stagewright.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["build"]
html_theme = "furo"
html_title = "Stagewright"
html_show_sourcelink = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
copybutton_exclude = ".linenos, .gp, .go"

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
default_role = "code"  # docstrings set names in single backticks
suppress_warnings = ["ref.python"]  # two documents may have fields of one name


class CommandHelp(Directive):
    """A section for each command of the command line, with what its ``--help-all`` prints."""

    def run(self) -> list[nodes.Node]:
        commands = getattr(get_command(build_app()), "commands")  # noqa: B009 - typed as a command
        return [self._section([]), *(self._section([name]) for name in commands)]

    def _section(self, arguments: list[str]) -> nodes.Node:
        name = " ".join(["stagewright", *arguments])
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            main([*arguments, "--help-all"])
        text = printed.getvalue().strip("\n")
        section = nodes.section("", nodes.title("", name), ids=[nodes.make_id(name)], names=[name])
        section += nodes.literal_block(text, text, language="text")
        return section


def setup(app: Sphinx) -> None:
    """Register the directive; Sphinx calls this."""
    app.add_directive("command-help", CommandHelp)
