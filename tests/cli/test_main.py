"""The commands as a whole."""

import importlib
import re
import shlex
from keyword import iskeyword

import pytest
import typer
from typer.main import get_command

import stagewright
from stagewright.cli.main import COMMANDS, build_app


def command_of(name):
    return get_command(build_app()).commands[name]


def test_version(run):
    ran = run("--version")
    assert (ran.code, ran.stdout) == (0, f"stagewright {stagewright.__version__}\n")


def test_help_lists_every_command(run):
    ran = run("--help")
    assert ran.code == 0
    assert all(f"\n  {name} " in ran.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_two_examples_that_it_takes(run, name):
    lines = run(name, "--help").stdout.splitlines()
    examples = lines[lines.index("Examples:") + 1 :]
    assert len(examples) == 2
    for example in examples:
        program, called, *words = shlex.split(example)
        assert (program, called) == ("stagewright", name)
        command_of(name).make_context(name, words)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_short_unless_all_of_it_is_asked_for(run, name):
    short, full = (run(name, word).stdout.splitlines() for word in ("--help", "--help-all"))
    assert len(short) <= 72
    # Every flag is named, also where it is not explained.
    flags = [option for one in command_of(name).params for option in one.opts]
    for text in (short, full):
        # A flag may be broken at a hyphen.
        joined = re.sub(r"-\s+", "-", " ".join(text))
        assert [flag for flag in flags if flag.startswith("--") and flag not in joined] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself_and_takes_json(run, name):
    ran = run(name, "--help")
    assert ran.code == 0
    assert f"Usage: stagewright {name}" in ran.stdout
    assert "--json" in ran.stdout


def test_a_flag_that_is_no_flag_leads_to_the_nearest(run):
    ran = run("plan", "gpt2-xl", "--device", "4x24GB")
    assert ran.code == 2
    assert "no such option: --device; did you mean --devices?" in ran.stderr


def test_flags_of_other_names_are_known(run):
    told = run("plan", "p.json", "-d", "4xcpu", "--tp", 2).stderr
    assert "no such option: --tp; did you mean --tensor?" in told
    assert "--tensor" not in run("show", "p.json", "--tp", 2).stderr


def test_commands_are_the_registry():
    app = build_app()
    assert isinstance(app, typer.Typer)
    assert [command.name for command in app.registered_commands] == list(COMMANDS)
    for name in COMMANDS:
        module = f"{name}_" if iskeyword(name) else name
        assert importlib.import_module(f"stagewright.cli.commands.{module}").command.__doc__
