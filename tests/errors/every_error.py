"""Every error class of the library, and an error of each with all of its details."""

from __future__ import annotations

import ast
import inspect
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import stagewright
from stagewright.core.cluster.shorthand import parse_devices
from stagewright.core.errors import Infeasible, StagewrightError
from stagewright.core.plan.plan import PlanOptions, Remedy
from stagewright.formats.expressible import Inexpressible
from stagewright.formats.runtimes.registry import TARGETS
from stagewright.formats.target import Rejection

PACKAGE = Path(stagewright.__file__).parent

REMEDY = Remedy("recompute='auto'", parse_devices("2x24GB"), PlanOptions(recompute="auto"), 0.5)

REJECTION = Rejection("replicas", "stages have [2, 1] replicas", "max_replicas=1")


@cache
def error_classes() -> tuple[type[StagewrightError], ...]:
    """Return the base and every class below it, found in the sources and then imported."""
    bases: dict[tuple[str, str], set[str]] = {}
    for path in sorted(_sources()):
        name = ".".join(path.with_suffix("").relative_to(PACKAGE.parent).parts)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases[name, node.name] = {ast.unparse(base).split(".")[-1] for base in node.bases}
    known = {"StagewrightError"}
    while new := {name for (_, name), found in bases.items() if found & known} - known:
        known |= new
    return tuple(getattr(import_module(module), name) for module, name in bases if name in known)


def _sources() -> list[Path]:
    folders = [path for path in PACKAGE.iterdir() if path.is_dir()]
    inside = [path for folder in folders for path in folder.resolve().rglob("*.py")]
    roots = {folder.resolve(): folder for folder in folders}
    found = list(PACKAGE.glob("*.py"))
    for path in inside:
        root = next(root for root in roots if root in path.parents)
        found.append(roots[root] / path.relative_to(root))
    return found


SAMPLES: dict[str, Any] = {
    "str": "text", "str | None": "text", "int": 3, "int | None": 3, "bool": True,
    "float | None": 2.5, "tuple[int, ...]": (1, 2),
}  # fmt: skip


def make_error(kind: type[StagewrightError]) -> StagewrightError:
    """Return an error that has a note and a value for each argument of its constructor."""
    if kind is Infeasible:
        error: StagewrightError = Infeasible(
            "stage 0 needs 30 GiB", constraint="memory", required=30.0, available=24.0,
            remedies=(REMEDY,), summary="30 GiB",
        )  # fmt: skip
    elif kind is Inexpressible:
        error = Inexpressible(TARGETS["vllm"], (REJECTION,))
    elif kind.__init__ in (Exception.__init__, StagewrightError.__init__) or not hasattr(
        kind.__init__, "__code__"
    ):
        error = kind("what happened")
    else:
        given = {
            name: SAMPLES[parameter.annotation]
            for name, parameter in inspect.signature(kind.__init__).parameters.items()
            if name != "self"
        }
        error = kind(**given)
    error.add_note("seen on rank 1")
    return error


def details_of(error: StagewrightError) -> dict[str, Any]:
    return {name: getattr(error, name) for name in get_type_hints(type(error))}
