"""The public surface: what `stagewright.__all__` promises exists, and nothing else is promised."""

import ast
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import stagewright


def test_versions_agree(pyproject):
    assert pyproject["project"]["version"] == stagewright.__version__
    assert metadata.version("stagewright") == stagewright.__version__


def test_editors_see_the_names_that_exist():
    """The names imported for type checkers are the ones loaded on first use."""
    tree = ast.parse(Path(stagewright.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    declared = {
        alias.name: statement.module
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert declared == stagewright._HOME
    assert set(stagewright.__all__) == {"__version__", *declared}
    assert set(stagewright.__all__) <= set(dir(stagewright))


@pytest.mark.parametrize("name", stagewright.__all__)
def test_every_public_name_resolves(name):
    assert getattr(stagewright, name) is not None


def test_what_has_moved_is_still_where_it_was():
    from stagewright.runtime import distributed
    from stagewright.runtime.ranks import process_groups as process_group

    assert distributed.init_process_group is process_group.init_process_group
    assert stagewright.init_process_group is process_group.init_process_group


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        stagewright.nothing  # noqa: B018


def test_planning_names_resolve_without_torch():
    names = [
        name
        for name, home in stagewright._HOME.items()
        if home.partition(".")[0] in ("core", "planner", "formats")
    ]
    assert {"plan", "Plan", "Profile", "validate"} <= set(names)
    code = """
import sys
sys.modules["torch"] = None
import stagewright
for name in sys.argv[1:]:
    getattr(stagewright, name)
"""
    subprocess.run([sys.executable, "-c", code, *names], check=True)
