"""Precision as requests name it: of products and tensors, or a recipe of training."""

from __future__ import annotations

from typing import TypeAlias, cast, get_args

from ..cluster.accelerators import Precision
from ..errors import InvalidInput
from ..models.training_memory import RECIPES, Recipe

AskedPrecision: TypeAlias = Precision | Recipe


def split_precision(asked: AskedPrecision | None) -> tuple[Precision | None, Recipe | None]:
    """Return the precision to estimate in, and the recipe that was named.

    Raises:
        InvalidInput: The recipe's operations have types that only a run tells.
    """
    if asked is None or asked in get_args(Precision):
        return cast("Precision | None", asked), None
    name = cast("Recipe", asked)
    recipe = RECIPES[name]
    if recipe.autocast is not None:
        similar = "bf16_mixed" if recipe.autocast == "bfloat16" else "fp16_mixed"
        raise InvalidInput(
            f"{name} cannot be estimated: which operations autocast leaves in float32 shows when "
            f"they run. Profile the model under autocast, or estimate {similar!r}, which takes as "
            "many bytes a parameter",
            field="/precision",
        )
    return recipe.weights, name
