"""Recipes of precision in the runtime: converted weights, wider gradients, master weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.errors import InvalidInput
from ..core.models.training_memory import RECIPES, FloatType, Recipe, RecipeEntry
from ..core.plan.plan import Plan
from .replicas.strategy import Strategy

MASTER = "master_weight"
"""Name of the float32 weights in an optimizer's state, and in checkpoints."""


def choose_recipe(plan: Plan, precision: Recipe | Literal["plan"] | None) -> Recipe | None:
    """Return the recipe to train by; `None` to leave the model as it is.

    Raises:
        InvalidInput: The name is of no recipe.
    """
    chosen = plan.options.precision if precision == "plan" else precision
    if chosen is not None and chosen not in RECIPES:
        raise InvalidInput(
            f"precision is {precision!r}; use 'plan', None or one of {', '.join(RECIPES)}"
        )
    return chosen


def choose_autocast(recipe: Recipe | None, autocast: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype to autocast to; raise `InvalidInput` if the recipe has another."""
    if recipe is None:
        return autocast
    planned = RECIPES[recipe].autocast
    wanted = None if planned is None else to_dtype(planned)
    if autocast not in (None, wanted):
        raise InvalidInput(
            f"the plan is for precision {recipe!r}, which means autocast={wanted}, not {autocast}; "
            "leave autocast out, plan in the other precision, or build with precision=None"
        )
    return wanted


def convert_model(
    model: nn.Module,
    recipe: Recipe | None,
    plan: Plan,
    strategy: Strategy | Mapping[int, Strategy] | None = None,
) -> None:
    """Convert a model's weights to a recipe's type, in place.

    ``strategy`` is what the caller wants of replicas instead of the plan's.

    Raises:
        InvalidInput: A strategy of replicas does not go with the recipe.
    """
    if recipe is None or (entry := RECIPES[recipe]).weights == "float32":
        return
    planned = ["fully_shard" for stage in plan.stages if stage.strategy == "fully_shard"]
    asked = list(strategy.values()) if isinstance(strategy, Mapping) else [strategy]
    for each in planned if strategy is None else asked:
        if each != "reduce":
            raise InvalidInput(
                f"replicas that share a stage by {each!r} keep gradients and weights in types of "
                f"their own, and the plan is for precision {recipe!r}; plan with "
                "--strategies zero1, use strategy='reduce', or build with precision=None"
            )
    model.to(to_dtype(entry.weights))


def widen_gradients(module: nn.Module, recipe: Recipe | None) -> None:
    """Have gradients summed in the recipe's type where it is wider than the weights'."""
    if recipe is None or not _widens(RECIPES[recipe]):
        return
    for parameter in module.parameters():
        parameter.grad_dtype = to_dtype(RECIPES[recipe].gradients)


def keep_master_weights(optimizer: Optimizer, recipe: Recipe | None) -> None:
    """Have an optimizer update float32 copies of its weights, which its state keeps.

    Each step gives it the copies in place of the weights, and rounds them to the weights
    afterwards. Its moments are made in that step, so they are float32, too. Gradients are consumed.
    """
    if recipe is None or RECIPES[recipe].weights == "float32" or not RECIPES[recipe].copy_bytes:
        return
    models: dict[nn.Parameter, Tensor] = {}

    def before(self: Optimizer, args: Any, kwargs: Any) -> None:
        for parameter in _parameters(self):
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            # Taken out: optimizers tell by an empty state that a parameter is new.
            master = state.pop(MASTER, None)
            models[parameter] = parameter.data
            gradient = parameter.grad.float()
            parameter.grad = None
            parameter.data = parameter.data.float() if master is None else master
            parameter.grad = gradient

    def after(self: Optimizer, args: Any, kwargs: Any) -> None:
        for parameter, weights in models.items():
            parameter.grad = None
            self.state[parameter][MASTER] = parameter.data
            weights.copy_(parameter.data)
            parameter.data = weights
        models.clear()

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def scales_loss(recipe: Recipe | None) -> bool:
    """Return True if gradients of the recipe would underflow without a loss scale."""
    return recipe is not None and RECIPES[recipe].scales_loss


def to_dtype(name: FloatType) -> torch.dtype:
    found: torch.dtype = getattr(torch, name)
    return found


def _widens(entry: RecipeEntry) -> bool:
    return entry.gradients != entry.weights


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [each for group in optimizer.param_groups for each in group["params"]]
