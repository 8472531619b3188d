"""Registry of the runtimes that plans can be exported to and cuts imported from."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import TypeAdapter

from ...core.errors import InvalidInput
from ...core.plan.plan import Plan
from ...core.profile.profile import Profile
from ...planner.problem.input_checks import require_plan, require_profile
from ..expressible import check_expressible
from ..gpu_numbers import read_visible
from ..settings import Settings
from ..target import Export, ImportedCut, ModelLayers, Rejection, Target, TargetRules
from ..target_tables import read_table
from . import (
    accelerate,
    colossalai,
    deepspeed,
    llama_cpp,
    maxtext,
    megatron,
    pipedream,
    torch_pipelining,
    torchgpipe,
    torchtitan,
)
from .block_counts import split_equally, split_evenly
from .servers import SERVERS, Server

MODULES: dict[str, ModuleType | Server] = {
    "torch": torch_pipelining,
    "torchtitan": torchtitan,
    "megatron": megatron,
    "deepspeed": deepspeed,
    "accelerate": accelerate,
    **SERVERS,
    "colossalai": colossalai,
    "maxtext": maxtext,
    "llama.cpp": llama_cpp,
    "torchgpipe": torchgpipe,
    "pipedream": pipedream,
}
"""Each target's module, or server, with its ``write`` and ``read``."""

CHECKS: dict[str, Callable[[Plan], tuple[Rejection, ...]]] = {
    "torch": torch_pipelining.check_folded,
    "megatron": megatron.check_interleaving,
    "deepspeed": deepspeed.check_tied,
    "torchgpipe": torchgpipe.check_duplicates,
}
"""Refusals that the rules do not cover."""

DEFAULT_SPLITS: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "torchtitan": torchtitan.split_by_default,
    "megatron": split_equally,
    **{name: server.split_by_default for name, server in SERVERS.items()},
    "colossalai": split_evenly,
    "maxtext": split_equally,
}


def _build_target(name: str, row: dict[str, Any]) -> Target:
    """Return the target of a row of ``tables/targets.toml``, whose values are checked."""
    module, file_name = MODULES[name], row.pop("file_name")
    return Target(
        name=name,
        title=module.TITLE,
        checked_with=module.CHECKED,
        file_name=file_name,
        rules=TypeAdapter(TargetRules).validate_python(row),
        write=module.write,
        read=module.read,
        check=CHECKS.get(name, lambda plan: ()),
        default_split=DEFAULT_SPLITS.get(name),
    )


TARGETS: dict[str, Target] = {
    name: _build_target(name, row) for name, row in read_table("targets").items()
}

MAX_TEXT = 2**20
"""Characters of a file that cuts are read from."""

MOST_SEARCHED = 10_000
"""Characters in which a document of ours names its kind."""

_OWN_DOCUMENT = re.compile(r'"schema_version":\s*"stagewright\.(\w+)/')
_FILE_NAME = re.compile(r"\S{1,1000}\.(sh|py|json|toml|ya?ml|txt|csv|conf)")


def find_target(name: str | Target) -> Target:
    """Return a target by its name. Raises: InvalidInput."""
    if isinstance(name, Target):
        return name
    if not isinstance(name, str):
        raise InvalidInput(
            f"the target is of type {type(name).__name__}; name one of {', '.join(TARGETS)}"
        )
    target = TARGETS.get(name)
    if target is None:
        close = get_close_matches(name, TARGETS, n=1)
        hint = f"did you mean {close[0]!r}? There" if close else "there"
        raise InvalidInput(f"no target is called {name!r}; {hint} are {', '.join(TARGETS)}")
    return target


def export(plan: Plan, target: str | Target) -> Export:
    """Write a plan in the form of another runtime.

    Args:
        plan: A plan that the runtime can express; plan with ``--for`` to be sure of one.
        target: Name of the runtime, such as ``megatron``.

    Raises:
        InvalidInput: There is no such target, or the plan is something else, such as a path.
        Inexpressible: The runtime lacks something the plan uses; each is named with the option
            that avoids it.
    """
    found = find_target(target)
    check_expressible(require_plan(plan), found)
    return found.write(plan)


def import_cut(cut: str | Path, target: str | Target, model: Profile | ModelLayers) -> ImportedCut:
    """Read a cut in the form of another runtime, for a model.

    Args:
        cut: The text, or a file with it.
        target: Name of the runtime.
        model: Profile, or names, of the model's layers.

    Raises:
        InvalidInput: There is no such target, or file, or the text is not in its form.
    """
    found, text = find_target(target), read_text(cut)
    if document := _OWN_DOCUMENT.search(text[:MOST_SEARCHED]):
        raise InvalidInput(
            f"this is a {document[1]} of Stagewright, no cut in the form of {found.title}"
            + "; explain and show judge plans, and export writes them for it"
            * (document[1] == "plan")
        )
    if len(text) > MAX_TEXT:
        raise InvalidInput(f"the text has {len(text)} characters, at most {MAX_TEXT} are read")
    layers = model if isinstance(model, ModelLayers) else ModelLayers.of(require_profile(model))
    rules, settings = found.rules, Settings.read(text, found.name)
    read = found.read(settings, layers)
    return replace(
        read,
        inference=rules.inference,
        last_position=rules.last_position,
        one_machine=rules.devices == "numbers",
        visible=read_visible(text, settings.words.get("cuda-visible-devices", "")),
        tensor=read.tensor * settings.tensor,
        notes=(*settings.notes, *read.notes),
    )


def read_text(cut: str | Path) -> str:
    """Return a file's content, or the text itself if it is no file's name. Raises: InvalidInput."""
    if not isinstance(cut, str | Path):
        raise InvalidInput(
            f"the cut is of type {type(cut).__name__}; give its text, or the file's path"
        )
    path = Path(cut)
    is_named = isinstance(cut, Path) or _FILE_NAME.fullmatch(cut) is not None
    try:
        return path.read_text(encoding="utf-8") if is_named or _is_file(path) else str(cut)
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise InvalidInput(f"cannot read {path}: {error}") from None


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a text too long, or with characters that no name has
        return False
