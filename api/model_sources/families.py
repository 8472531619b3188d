"""Check, before a child is started, whether this server can build a model family."""

from __future__ import annotations

import importlib.util

from ...core.errors import InvalidInput
from ...core.models.families import ModelSpec

OWN_FAMILIES = ("mlp", "resnet", "unet")
"""Families that need only torch; all others are built by ``transformers``."""

INSTEAD = (
    "ask the server's operator to install stagewright[hf], or send a graph made by "
    "'stagewright capture' where transformers is installed"
)


def why_not_buildable(family: str) -> str:
    """Return what this machine lacks to build a family; empty if nothing."""
    if family in OWN_FAMILIES or importlib.util.find_spec("transformers") is not None:
        return ""
    return "transformers is not installed on this server"


def check_buildable(model: ModelSpec | None) -> None:
    """Raise `InvalidInput`, with what is missing, if a family cannot be built here."""
    reason = "" if model is None else why_not_buildable(model.family)
    if model is not None and reason:
        raise InvalidInput(
            f"the family {model.family!r} cannot be built: {reason}; {INSTEAD}",
            field="/model/family",
        )
