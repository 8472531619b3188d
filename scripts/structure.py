"""Measure how easy the code is to find one's way in; print a table or JSON.

usage: python scripts/structure.py [CHECKOUT] [--json] [--check] [--no-calls]

CHECKOUT is this checkout unless another is named, such as a worktree of an older commit, which is
measured by the same rules. ``--check`` exits with 1 if a figure misses its target. ``--no-calls``
leaves out the two figures that need the dependencies of the server.

Rules: product code is the folders of ``[tool.setuptools.package-dir]``. A room of a top folder is a
module in it or a whole subfolder; an arrow is an import of one room from another, also inside a
function or for types only. A file is entered if one of its functions is called.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import networkx as nx

QUESTIONS = {"What", "Which", "Whether", "How", "Who", "Whose", "Where", "When", "Why"}
PRAGMAS = ("# type:", "# noqa", "# pragma", "# fmt:")
CHAINS = {"planner": 11, "api": 13}
"""Longest chain of rooms allowed in a top folder; `CHAIN` in the others."""
CHAIN = 8
MODULES_PER_FOLDER = 18
ONE_FILE_A_COMMAND = "cli/commands"


@dataclass(frozen=True)
class Figure:
    """One row of the table: a measured value and the most (or least) it may be."""

    name: str
    value: float
    most: float | None = None
    least: float | None = None
    detail: str = ""

    @property
    def holds(self) -> bool:
        return not (
            (self.most is not None and self.value > self.most)
            or (self.least is not None and self.value < self.least)
        )


@dataclass(frozen=True)
class Module:
    """A source file of the product with its syntax tree."""

    path: str
    name: str
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.name if self.path.endswith("__init__.py") else self.name.rpartition(".")[0]


def read_modules(root: Path) -> list[Module]:
    """Return every module of the product, by the folders that the packaging names."""
    project = tomllib.loads((root / "pyproject.toml").read_text())
    modules = []
    for package, folder in project["tool"]["setuptools"]["package-dir"].items():
        for path in sorted((root / folder).rglob("*.py")):
            if any(parent.is_symlink() for parent in path.parents):
                continue
            inside = path.relative_to(root / folder).with_suffix("").parts
            inside = inside[:-1] if inside[-1] == "__init__" else inside
            text = path.read_text()
            name = ".".join((package, *inside))
            modules.append(Module(str(path.relative_to(root)), name, text, ast.parse(text)))
    return modules


def imported(module: Module, known: set[str]) -> Iterator[str]:
    """Yield the modules of the product that a module imports, anywhere in it."""
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        parents = module.package.split(".")
        base = parents[: len(parents) - node.level + 1] if node.level else []
        source = ".".join((*base, *(node.module.split(".") if node.module else ())))
        for alias in node.names:
            if f"{source}.{alias.name}" in known:
                yield f"{source}.{alias.name}"
            elif source in known:
                yield source


def rooms_of(modules: list[Module], top: str) -> nx.DiGraph:
    """Return the rooms of a top folder and the arrows between them.

    A room has the attribute ``is_folder``.
    """
    known = {module.name for module in modules}
    prefix = f"stagewright.{top}."
    graph = nx.DiGraph()

    def room(name: str) -> str | None:
        return name[len(prefix) :].split(".")[0] if name.startswith(prefix) else None

    for module in modules:
        here = room(module.name)
        if here is None:
            continue
        graph.add_node(here, is_folder=f"/{here}/" in f"/{module.path}")
        for target in imported(module, known):
            there = room(target)
            if there is not None and there != here:
                graph.add_edge(here, there)
    return graph


def structure(modules: list[Module]) -> list[Figure]:
    """Measure the folders: modules in each, chains of imports, arrows, mutual imports."""
    per_folder = Counter(
        module.path.rpartition("/")[0]
        for module in modules
        if not module.path.endswith("__init__.py")
    )
    per_folder.pop(ONE_FILE_A_COMMAND, None)
    crowded, most = per_folder.most_common(1)[0]
    figures = [Figure("modules in the largest folder", most, MODULES_PER_FOLDER, detail=crowded)]
    for top in sorted({module.path.split("/")[0] for module in modules} - {"stagewright"}):
        graph = rooms_of(modules, top)
        folders = [name for name, data in graph.nodes(data=True) if data.get("is_folder")]
        mutual = sorted(
            "+".join(sorted(group))
            for group in nx.strongly_connected_components(graph)
            if len(group) > 1
        )
        chain = nx.dag_longest_path_length(nx.condensation(graph)) + 1 if graph else 0
        figures.append(
            Figure(
                f"{top}: longest chain of imports",
                chain,
                CHAINS.get(top, CHAIN),
                detail=f"{len(graph)} rooms, {graph.number_of_edges()} arrows",
            )
        )
        figures.append(
            Figure(f"{top}: rooms that import each other", len(mutual), 0, detail=", ".join(mutual))
        )
        arrows = graph.subgraph(folders).number_of_edges()
        figures.append(Figure(f"{top}: arrows between subfolders", arrows))
    return figures


def documented(
    tree: ast.Module,
) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield what can have a docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def prose(modules: list[Module]) -> list[Figure]:
    """Measure names, docstrings, comments and lengths."""
    classes: dict[str, list[str]] = defaultdict(list)
    docstrings = questions = comments = lines = 0
    longest, where = 0, ""
    for module in modules:
        lines += module.text.count("\n")
        comments += sum(
            token.type == tokenize.COMMENT and not token.string.startswith(PRAGMAS)
            for token in tokenize.generate_tokens(io.StringIO(module.text).readline)
        )
        for statement in module.tree.body:
            if isinstance(statement, ast.ClassDef) and not statement.name.startswith("_"):
                classes[statement.name].append(module.path)
        for node in documented(module.tree):
            docstring = ast.get_docstring(node)
            if docstring:
                docstrings += 1
                questions += docstring.split()[0].strip(",.;:") in QUESTIONS
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > longest:
                    longest, where = length, f"{module.path}:{node.lineno} {node.name}"
    twice = sorted(name for name, places in classes.items() if len(places) > 1)
    return [
        Figure("public class names defined twice", len(twice), 0, detail=", ".join(twice)),
        Figure(
            "docstrings opening with a question word, %",
            round(100 * questions / docstrings, 2),
            1,
            detail=f"{questions} of {docstrings}",
        ),
        Figure("comments per 100 lines", round(100 * comments / lines, 2), least=1.5),
        Figure("lines of the product", lines, 99_300),
        Figure("longest function, lines", longest, 62, detail=where),
    ]


PROBE = """
import importlib, json, os, sys, threading, typing
import stagewright

root = os.path.dirname(os.path.abspath(stagewright.__file__))
entered = set()

def watch(frame, event, argument):
    # 1 is CO_OPTIMIZED: functions have it, bodies of modules and classes do not
    if event == "call" and frame.f_code.co_flags & 1:
        entered.add(frame.f_code.co_filename)

def enter(call):
    entered.clear()
    threading.setprofile_all_threads(watch) if hasattr(threading, "setprofile_all_threads") \\
        else threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    files = sorted(os.path.relpath(name, root) for name in entered if name.startswith(root))
    return [name for name in files if not name.startswith("..")]

def profile(layers):
    timing = lambda s: {"median_s": s}
    return {
        "model": "Example",
        "layers": [
            {
                "layer": {"name": f"layer {i}", "module_type": "Layer", "parameter_bytes": 10**5},
                "forward": timing(1e-3 * (1 + i % 5)),
                "backward": timing(1e-3 * (2 + i % 3)),
                "saved_activation_bytes": 10**5 * (1 + i % 2),
            }
            for i in range(layers)
        ],
        "boundaries": [
            {
                "after": i,
                "tensors": [
                    {"name": "x", "shape": [1000], "dtype": "float32", "requires_grad": True}
                ],
            }
            for i in range(layers - 1)
        ],
    }

def plan(layers):
    model = stagewright.Profile.model_validate_json(json.dumps(profile(layers)))
    cluster = stagewright.Cluster.uniform(4, memory_bytes=10**10)
    return lambda: stagewright.plan(model, cluster)

def request():
    from starlette.testclient import TestClient
    from stagewright.api.app import create_app

    settings = typing.get_type_hints(create_app)["settings"]
    given = {"token": "a-token-for-the-probe", "database": ":memory:", "plan_processes": 0,
             "scheduler": "threads"}
    # one thread of threading before 3.12: profile threads from their start
    threading.setprofile(watch)
    with TestClient(create_app(settings(**given)), base_url="http://localhost") as client:
        client.headers["Authorization"] = "Bearer a-token-for-the-probe"

        def post(layers):
            body = {"profile": profile(layers), "cluster": "4xcpu"}
            answer = client.post("/v1/plans", json=body)
            assert answer.status_code == 201, answer.text

        post(12)  # whatever is made on first use is made now
        return enter(lambda: post(24))

plan(12)()
print(json.dumps({"plan": enter(plan(24)), "post": request()}))
"""


def trace_calls(root: Path) -> tuple[list[str], list[str]]:
    """Return the files that a call of `plan` and a ``POST /v1/plans`` enter, in a new process."""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    ran = subprocess.run(
        [sys.executable, "-c", PROBE],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        raise SystemExit(f"the calls could not be traced:\n{ran.stderr}")
    entered = json.loads(ran.stdout.splitlines()[-1])
    return entered["plan"], entered["post"]


def calls(root: Path) -> list[Figure]:
    """Count the files that a call of `plan` and a ``POST /v1/plans`` enter."""
    plan, post = trace_calls(root)
    return [
        Figure("files entered by plan()", len(plan), 40),
        Figure("files entered by POST /v1/plans", len(post), 65),
    ]


def main() -> int:
    """Print the figures; return 1 if ``--check`` is given and one misses its target."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    here = Path(__file__).resolve().parents[1]
    parser.add_argument("checkout", nargs="?", type=Path, default=here)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument("--no-calls", action="store_true", help="leave out the traced calls")
    arguments = parser.parse_args()
    root = arguments.checkout.resolve()
    modules = read_modules(root)
    figures = structure(modules) + prose(modules)
    if not arguments.no_calls:
        figures += calls(root)
    if arguments.json:
        rows = {
            figure.name: {"value": figure.value, "holds": figure.holds, "detail": figure.detail}
            for figure in figures
        }
        print(json.dumps(rows, indent=2))
    else:
        for figure in figures:
            target = next(
                (
                    f"{word} {limit:g}"
                    for word, limit in (("at most", figure.most), ("at least", figure.least))
                    if limit is not None
                ),
                "",
            )
            mark = " " if figure.holds else "!"
            print(f"{mark} {figure.name:48} {figure.value:>8g}  {target:14} {figure.detail[:90]}")
    return int(arguments.check and not all(figure.holds for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
