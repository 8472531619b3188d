"""Commands that people and machines are told to run exist; versions and files are in order."""

import re
import subprocess
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from stagewright.cli.main import COMMANDS
from stagewright.cli.support.optional_dependencies import EXTRAS


@pytest.fixture(scope="module")
def make_targets(repository) -> set[str]:
    return set(re.findall(r"^([a-z]+):", (repository / "Makefile").read_text(), re.MULTILINE))


@pytest.fixture(scope="module")
def pins(repository) -> dict[str, str]:
    lines = (repository / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonical(name): version for name, version in pairs}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def commands_in(text: str) -> set[str]:
    """Every command line in a document's code spans and console blocks."""
    spans = re.findall(r"`([^`\n]+)`", text)
    blocks = re.findall(r"```(?:console|bash|sh)\n(.*?)```", text, re.DOTALL)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return {line.strip() for line in [*spans, *lines]}


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", ".ci/run"])
def test_documents_name_commands_that_exist(document, repository, make_targets):
    text = (repository / document).read_text()
    lines = commands_in(text) if document.endswith(".md") else set(text.splitlines())
    for line in lines:
        line = line.removeprefix("exec ")
        if made := re.match(r"make ([a-z]+)", line):
            assert made[1] in make_targets, line
        if called := re.match(r"stagewright ([a-z]+)", line):
            assert called[1] in COMMANDS, line
        for path in re.findall(r"\S+/\S+\.(?:py|sh|md|txt)\b", line):
            if not path.startswith(("http", ".venv/")):
                assert (repository / path).exists(), line


def test_every_claim_has_a_command_that_exists(repository, make_targets):
    text = (repository / "CONTRIBUTING.md").read_text()
    section = text.partition("## Claims, and the commands that check them")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+) \| (.+) \|$", section, re.MULTILINE)[1:]
    assert len(rows) >= 10
    for claim, cell in rows:
        commands = re.findall(r"`([^`]+)`", cell)
        assert commands, claim
        for command in commands:
            program, *arguments = command.split()
            if program == "make":
                assert set(arguments) <= make_targets, claim
            elif program == "stagewright":
                assert arguments[0] in (*COMMANDS, "--help"), claim
            else:
                words = command.split()
                paths = [word for word in words if "/" in word and not word.startswith(".venv/")]
                assert paths, claim
                assert all((repository / path).exists() for path in paths), claim


def test_extras_are_the_ones_in_pyproject(pyproject):
    declared = pyproject["project"]["optional-dependencies"]

    def packages(extra: str) -> set[str]:
        found: set[str] = set()
        for text in declared[extra]:
            requirement = Requirement(text)
            if requirement.name == "stagewright":
                found.update(*(packages(other) for other in requirement.extras))
            else:
                found.add(
                    {"pyjwt": "jwt"}.get(requirement.name, requirement.name.replace("-", "_"))
                )
        return found

    assert {extra: packages(extra) for extra in EXTRAS} == {
        extra: set(names) for extra, names in EXTRAS.items()
    }


def test_every_dependency_is_pinned_within_its_range(pyproject, pins):
    project = pyproject["project"]
    extras = chain.from_iterable(project["optional-dependencies"].values())
    for requirement in map(Requirement, [*project["dependencies"], *extras]):
        if requirement.name != "stagewright":
            assert pins[canonical(requirement.name)] in requirement.specifier, requirement


def test_no_file_names_a_place_on_somebodys_machine(repository):
    """Also not the folder these files are in now."""
    places = [re.escape(str(repository)), r"/root/\w", r"/Users/\w", r"/home/\w", r"file:///\w"]
    pattern = re.compile("|".join(places))
    listing = subprocess.run(
        ["git", "ls-files"], cwd=repository, capture_output=True, text=True
    ).stdout.split()
    assert listing or not (repository / ".git").exists()
    for name in listing:
        path = repository / name
        if path.is_file() and path != Path(__file__).resolve():
            found = pattern.search(path.read_text(errors="replace"))
            assert found is None, f"{name}: {found}"
