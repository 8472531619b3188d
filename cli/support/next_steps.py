"""Commands suggested as the next step, ready to paste."""

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
    """Return a ``stagewright`` command with these words, quoted for a shell."""
    return shlex.join(["stagewright", *map(str, words)])


def suggest_planning(profile: Profile, file: Path) -> str:
    """Return the command that plans for several of the device that was profiled."""
    return command_line("plan", file, "--devices", devices_like(profile), "-o", "plan.json")


def devices_like(profile: Profile) -> str:
    """Return shorthand for several of the device that was profiled."""
    from ...core.plan.assumptions import find_profiled_device

    found = find_profiled_device(profile)
    if found is None:
        return "4x24GB" if profile.provenance.device.startswith("cuda") else "2xcpu"
    return "2xcpu" if found.backend == "cpu" else f"4x{found.name}"


def suggest_measuring(graph: Graph, file: Path) -> str:
    """Return the command that measures a graph, if that is possible without its code."""
    return command_line("profile", *([file] if graph.rebuildable else ["--help"]))


def suggest_after_plan(plan: Plan, file: Path, *, drawn: bool = False) -> str:
    """Return the command that draws a plan or, once it is drawn, trains or explains it."""
    if not drawn:
        return command_line("show", file, "--svg", file.with_suffix(".svg"))
    if plan.spec is not None and not plan.estimated:
        return command_line("run", file, "--compare")
    return command_line("explain", "--help")


def drop_flags(words: Sequence[str], flags: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return a command's words without some flags and without some options and their values."""
    kept: list[str] = []
    skip = False  # the previous word was a dropped option, whose value this is
    for word in words:
        name, equals, _ = word.partition("=")
        if skip:
            skip = False
        elif name in options:
            skip = not equals
        elif word not in flags:
            kept.append(word)
    return kept
