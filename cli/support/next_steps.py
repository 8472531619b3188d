"""The command that follows naturally, as words to paste."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...core.graph.graph import Graph
    from ...core.plan.plan import Plan
    from ...core.profile.profile import Profile


def command_line(*words: object) -> str:
    """``stagewright`` with these words, quoted for a shell."""
    return shlex.join(["stagewright", *map(str, words)])


def planning(profile: Profile, file: Path) -> str:
    """Plan a profile, for devices like the one it is of."""
    return command_line("plan", file, "--devices", devices_like(profile), "-o", "plan.json")


def devices_like(profile: Profile) -> str:
    """Some devices in shorthand whose times a profile holds."""
    from ...core.plan.assumptions import find_profiled_device

    found = find_profiled_device(profile)
    if found is None:
        return "4x24GB" if profile.provenance.device.startswith("cuda") else "2xcpu"
    return "2xcpu" if found.backend == "cpu" else f"4x{found.name}"


def measuring(graph: Graph, file: Path) -> str:
    """Measure a graph, if it can be without the model's code."""
    return command_line("profile", *([file] if graph.rebuildable else ["--help"]))


def after_plan(plan: Plan, file: Path, *, drawn: bool = False) -> str:
    """Draw a plan; once it is drawn, train it where that takes no code, or see what it misses."""
    if not drawn:
        return command_line("show", file, "--svg", file.with_suffix(".svg"))
    if plan.spec is not None and not plan.estimated:
        return command_line("run", file, "--compare")
    return command_line("explain", "--help")


def without(words: Sequence[str], flags: Sequence[str], options: Sequence[str]) -> list[str]:
    """A command's words without some flags, and without some options and their values."""
    kept: list[str] = []
    skip = False
    for word in words:
        name, equals, _ = word.partition("=")
        if skip:
            skip = False
        elif name in options:
            skip = not equals
        elif word not in flags:
            kept.append(word)
    return kept
