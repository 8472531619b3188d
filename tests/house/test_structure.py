"""The structure of the code keeps its figures: `scripts/structure.py` measures them."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def script(repository) -> ModuleType:
    """`scripts/structure.py`, imported by its path."""
    spec = importlib.util.spec_from_file_location("structure", repository / "scripts/structure.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def modules(script, repository):
    return script.read_modules(repository)


@pytest.fixture(scope="module")
def entered(script, repository):
    """Files that a plan and a ``POST /v1/plans`` pass through."""
    return script.trace_calls(repository)


def missed(figures) -> list[str]:
    return [
        f"{figure.name}: {figure.value:g} {figure.detail}" for figure in figures if not figure.holds
    ]


def test_folders_stay_small_and_import_one_way(script, modules):
    assert missed(script.structure(modules)) == []


def test_names_docstrings_comments_and_lengths_keep_their_figures(script, modules):
    assert missed(script.prose(modules)) == []


def test_a_class_name_taken_twice_is_found(script):
    text = 'class Plan:\n    """A plan."""\n'
    copies = [
        script.Module(f"{top}/again.py", f"stagewright.{top}.again", text, ast.parse(text))
        for top in ("core", "view")
    ]
    found = {figure.name: figure for figure in script.prose(copies)}
    assert found["public class names defined twice"].detail == "Plan"


def test_folders_that_import_each_other_are_found(script):
    texts = {
        "planner/cost/a.py": "def f():\n    from ..search.b import g\n",
        "planner/search/b.py": "from ..cost.a import f\n",
    }
    modules = [
        script.Module(
            path,
            "stagewright." + path.removesuffix(".py").replace("/", "."),
            text,
            ast.parse(text),
        )
        for path, text in texts.items()
    ]
    found = {figure.name: figure for figure in script.structure(modules)}
    assert found["planner: rooms that import each other"].detail == "cost+search"


def test_every_folder_says_what_lives_there(modules):
    openings = [module for module in modules if module.path.endswith("__init__.py")]
    silent = [m.path for m in openings if len(ast.get_docstring(m.tree) or "") < 40]
    assert silent == []


def test_the_map_names_files_that_exist(repository):
    page = (repository / "docs/concepts/architecture.md").read_text()
    named = re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", page)
    assert len(named) > 80
    assert [name for name in named if not (repository / name).exists()] == []


def test_the_map_names_every_file_a_plan_passes_through(entered, repository):
    """The documents of `core` are left out: everything reads them."""
    page = (repository / "docs/concepts/architecture.md").read_text()
    plan, post = entered
    assert [name for name in plan if not name.startswith("core/") and name not in page] == []
    trip = page.partition("## `POST /v1/plans`")[2]
    routed = [name for name in post if name.startswith(("api/routes/", "api/middleware/"))]
    assert [name for name in routed if name not in trip] == []
