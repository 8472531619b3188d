"""The commands as a whole."""

import importlib
from keyword import iskeyword

import pytest
import typer

import stagewright
from stagewright.cli.main import COMMANDS, build_app


def test_version(run):
    ran = run("--version")
    assert (ran.code, ran.stdout) == (0, f"stagewright {stagewright.__version__}\n")


def test_help_lists_every_command(run):
    ran = run("--help")
    assert ran.code == 0
    assert all(f"\n  {name} " in ran.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_and_takes_json(run, name):
    ran = run(name, "--help")
    assert ran.code == 0
    assert f"Usage: stagewright {name}" in ran.stdout
    assert "--json" in ran.stdout


def test_commands_are_the_registry():
    app = build_app()
    assert isinstance(app, typer.Typer)
    assert [command.name for command in app.registered_commands] == list(COMMANDS)
    for name in COMMANDS:
        module = f"{name}_" if iskeyword(name) else name
        assert importlib.import_module(f"stagewright.cli.commands.{module}").command.__doc__
