"""Families that this server could build, found out without building: before a child is started."""

from __future__ import annotations

import importlib.util

from ...core.errors import InvalidInput
from ...core.models.families import ModelSpec

OWN_FAMILIES = ("mlp", "resnet", "unet")
"""Those that need nothing beside torch; all others are built by ``transformers``."""

INSTEAD = (
    "whoever runs the server installs stagewright[hf] there; or send a graph that "
    "'stagewright capture' writes where transformers is installed"
)


def why_not_buildable(family: str) -> str:
    """What is missing on this machine to build a family; nothing if it can be."""
    if family in OWN_FAMILIES or importlib.util.find_spec("transformers") is not None:
        return ""
    return "transformers is not installed on this server"


def check_buildable(model: ModelSpec | None) -> None:
    """Refuse a family that cannot be built here.

    Raises:
        InvalidInput: It cannot.
    """
    reason = "" if model is None else why_not_buildable(model.family)
    if model is not None and reason:
        raise InvalidInput(
            f"the family {model.family!r} cannot be built: {reason}; {INSTEAD}",
            field="/model/family",
        )
